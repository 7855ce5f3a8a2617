// Package transport implements the session between a laptop and the traffic manager. Either end opens streams of bytes
// and of datagrams, over a few conns. When a conn breaks, another one replaces it, and its streams only pause.
//
//	Stream, Packets     flows: half-close, reset, windows that tune themselves, answers with a Code
//	───────────────
//	link (1 to N)       frames of all its streams, in turn (scheduler); a resumable byte stream in each
//	                    direction: counted, acknowledged, replayed (replay); heartbeats
//	───────────────
//	conn                any net.Conn: a port-forward stream, an upgraded HTTP connection, TLS over TCP
//
// The laptop runs a Client, which dials conns and keeps a Session up: it attaches the first link at once and the others
// in the background. The manager runs a Server on a listener. Each new stream uses the least busy link. When a conn
// fails, or receives nothing for some seconds, the client dials another. The ends then exchange the numbers of bytes
// that they have received, and the link continues from there. If the manager no longer knows the session, because it
// was restarted, the session's streams are reset and the Client creates a new session. spec.md specifies the wire
// format.
//
// Data waits in the program that produces it: a stream's writer blocks while its reader is slow (window), and every
// writer of a link blocks while the conn is slow, after 64 KiB. Nothing is dropped. Bulk streams share a link evenly,
// and a stream that writes little overtakes them. On a far path a link sends only as much as keeps the path busy
// (flight), so that little waits in the API server or in front of the line. New streams avoid links that carry much.
//
// # Why not an existing mux
//
// The first version used go-yamux v5.1. The table compares both over loopback TCP. The numbers are medians of five
// interleaved runs on two cores that were busy with other work, so processor time says more than elapsed time:
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
// go-yamux ran without resumption, which would add a copy and a goroutine. So the last two rows decided, not the speed.
// go-yamux queues a fixed number of 64 messages of 64 KiB, first in, first out. Open, Close and Reset wait for room in
// that queue, so they hang while a conn is replaced; here only data waits. go-yamux also does not coalesce its writes,
// which are expensive over an API server. This package copies a frame once, into the replay buffer, from which it
// writes to the conn. It reads a payload from the conn into the segment that the stream's reader gets.
package transport
