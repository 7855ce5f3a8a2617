// Package transport is the session between a laptop and the traffic manager: many streams of bytes and of
// datagrams, opened from either end, over a few conns that may break and be replaced without
// any stream noticing more than a pause.
//
//	Stream, Packets     flows: half-close, reset, windows that tune themselves, answers with a Code
//	───────────────
//	link (1 to N)       frames of all its streams, in turn (scheduler); a resumable byte stream in each
//	                    direction: counted, acknowledged, replayed (replay); heartbeats
//	───────────────
//	conn                any net.Conn: a port-forward stream, an upgraded HTTP connection, TLS over TCP
//
// A laptop runs a Client, which is given a way to dial conns and keeps a Session up: a first link at once,
// the others in the background. The manager runs a Server on a listener. Each new stream goes to the link that
// is least busy. When a conn fails, or nothing is received over it for some seconds, the client dials
// another, the ends tell each other how many bytes they have, and the link goes on from there. If the manager
// no longer knows the session, which is when it was restarted, the session's streams are reset and the Client
// makes a new one. The wire format is in spec.md.
//
// Whatever waits, waits in the program that produces the data: a stream's writer blocks when its reader is
// slow (window), and every writer of a link blocks when the conn is slow, after 64 KiB. Nothing is dropped.
// The bulk of many streams shares a link evenly, and a stream that writes little overtakes them.
//
// # Why not an existing mux
//
// It began with go-yamux v5.1. Measured against it over loopback TCP, medians of five interleaved runs on two
// cores that were busy with other work, so that the processor time says more than the clock would:
//
//	                                                         go-yamux    this package
//	processor time per 64 KiB, one stream                       39 µs           42 µs
//	the same, eight streams                                     51 µs           45 µs
//	the same per 1-byte round trip                             9.6 µs          8.4 µs
//	the same per open, 1 byte each way, close                   26 µs           20 µs
//	allocated per open, both ends                      2247 B in 14    1450 B in 9
//	held per idle stream and end, without its reader           1.2 KB          0.7 KB
//	1-byte round trip beside 8 uploads at 20 MB/s             134 ms           16 ms
//	Reset while the conn is stalled                            hangs         at once
//
// and go-yamux had no resumption beneath it there, which costs another copy and another goroutine on the way.
// So speed did not decide, but the last two rows did. go-yamux queues up to 64 messages of 64 KiB, first in,
// first out, and that number is fixed; Open, Close and Reset wait for room in that queue, so that everything
// hangs while a conn is replaced, where here only data waits; and it does not coalesce its writes, which
// are expensive on our conns. Here a frame is copied once into the replay buffer, from which the conn is
// written, and its payload is read from the conn into the segment that the stream's reader gets.
package transport
