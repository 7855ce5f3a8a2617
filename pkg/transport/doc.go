// Package transport is the session between a laptop and the traffic manager: many streams of bytes and of
// datagrams, opened from either end, over a few carrier connections that may break and be replaced without
// any stream noticing more than a pause.
//
//	 Stream, Packets     flows: half-close, reset, windows that tune themselves, answers with a Code
//	 ───────────────
//	 link (1 to N)       frames of all its streams, in turn (scheduler); a resumable byte stream in each
//	                     direction: counted, acknowledged, replayed (replay); heartbeats
//	 ───────────────
//	 carrier             any net.Conn: a port-forward stream, an upgraded HTTP connection, TLS over TCP
//
// A laptop runs a Client, which is given a way to dial carriers and keeps a Session up: a first link at once,
// the others in the background. The manager runs a Server on a listener. Each new stream goes to the link that
// is least busy. When a carrier fails, or nothing is received over it for some seconds, the client dials
// another, the ends tell each other how many bytes they have, and the link goes on from there. If the manager
// no longer knows the session, which is when it was restarted, the session's streams are reset and the Client
// makes a new one. The wire format is in spec.md.
//
// Whatever waits, waits in the program that produces the data: a stream's writer blocks when its reader is
// slow (window), and every writer of a link blocks when the carrier is slow, after 64 KiB. Nothing is dropped.
// The bulk of many streams shares a link evenly, and a stream that writes little overtakes them.
//
// # Why not an existing mux
//
// It began with go-yamux v5.1. Measured against it, on two shared cores, over loopback TCP:
//
//	                                                         go-yamux     this package
//	 one stream, 64 KiB writes                             1370 MB/s       1600 MB/s
//	 eight streams                                         1550 MB/s       1600 MB/s
//	 1-byte round trip                                         11 µs            9 µs
//	 open, 1 byte each way, close                              26 µs           20 µs
//	 allocations per open, both ends                    2247 B in 14     1450 B in 9
//	 1-byte round trip beside 8 uploads at 20 MB/s            134 ms           13 ms
//	 memory of an idle stream, each end, with its reader              about 3.4 KB
//
// go-yamux had no resumption beneath it and one link there, this package has both and four links. What decided
// were the last rows and three facts: it queues up to 64 messages of 64 KiB first in, first out; Open, Close
// and Reset wait for that queue, so that they hang for as long as a carrier is stalled, where here only data
// waits; and its writes are not coalesced. Here a frame is copied once into the replay buffer, from which the
// carrier is written, and once out of the carrier into the segment that the reader gets.
package transport
