// Package packetlink carries whole IP packets between a laptop and the traffic manager over packet streams: streams of
// the transport on which packets go as frames.
//
//	frame: uint32, big endian: length of the rest │ virtio-net header, 10 bytes │ IP packet
//
// A packet crosses from one kernel to the other like this:
//
//	TUN ── read ──▶ Frame ── Sender.Send ─┬─ small: copied behind the last frame in the stream's queue
//	                (pooled)              └─ large: queued without a copy
//	                                              │
//	                       stream's queue ── one Write for each buffer full of frames ──▶ stream
//	                                                                                        ║
//	TUN ◀── write ── deliver(Frame) ◀── Check ◀─┬─ small: many in one Read, copied apart ◀── stream
//	                                            └─ large: read into its Frame
//
// Super-packets stay whole: a TUN device returns TCP segments of up to 64 KiB without a checksum, and the kernel at the
// other end accepts them like that. So nobody between the two kernels computes checksums or splits segments. If the
// other end has no such kernel (macOS, Windows), the Sender does that work, exactly as Linux would.
//
// # Packet streams
//
// A session has [Streams] packet streams, usually on different conns, because on one stream a keystroke would wait
// behind an upload. The Sender counts the bytes of each flow. A flow that sends much is a bulk flow and uses one of the
// streams 1 to 3, chosen by its hash. All other flows, and packets of other protocols than TCP and UDP, share stream 0,
// whose queue stays short. A flow whose count has decayed returns to stream 0 once the other end has everything that
// the flow sent before.
//
//	             > 64 KiB, with a barrier (barrier.go)
//	stream 0 ─────────────────────────────────────────▶ bulk stream
//	         ◀─────────────────────────────────────────
//	             < 16 KiB, when all has arrived (Marks)
//
// A flow keeps its order although it moves, and although one conn may be replaced long after another: a barrier ensures
// that in one direction, an acknowledgement in the other.
//
// Send never blocks. It drops a frame if the queue is full, or if the queue's first frame has waited too long: so the
// TCP inside learns the speed of the path, and waits stay short on a slow path. While a path is stalled Send drops
// nothing before the queue is full, so that TCP has nothing to repeat when the path moves again.
//
// # Why flows move
//
// The simple alternative pins each flow to one of N streams by its hash, and needs no flow table, barriers or Marks.
// It was measured with two kernels, four conns and eight flows that exchange one byte every 15 ms beside bulk flows;
// medians of 3 interleaved runs (line) or 5 (loopback, 2 busy cores), round trips in ms:
//
//	                                          flows move           pinned, N = 4        pinned, N = 8
//	                                        MB/s   p50   p99     MB/s   p50   p99     MB/s   p50   p99
//	60 ms, 100 Mb/s     1 download          11.6    84   111     11.8    94   205     11.7    82   144
//	behind a relay      8 downloads         11.5   106   288     11.1   142   381     11.1   157   408
//	                    1 upload            11.5    88   121     11.5   106   243     11.7    93   192
//	                    8 uploads           11.7   106   155     11.2   107   418     12.2   142   368
//	loopback            1 download           734   0.8   8.2      812   0.9    10      768   1.1   9.3
//	                    8 downloads          445    11    71      533    19    78      706    14    82
//	                    1 upload             762   0.9   8.9      840   1.1   7.4      680   1.0    10
//	                    8 uploads            623    12    54      657   9.4    43      447    21   108
//
// Pinning is as fast, but on a real line the slowest round trips take about twice as long, since some small flows share
// a stream, and its conn, with bulk. Small frames first within each pinned stream did not help: 8 uploads had a p99 of
// 340 instead of 276 ms, 1 upload 277 instead of 112. When one of four conns stalled, pinning held back about half of
// the flows (two streams may share a conn); flows that move were held back all together on the conn of stream 0, and
// only bulk flows on another. All flows continued in both cases.
//
// # Trust
//
// Frames come from another machine and go to a kernel. [Check] accepts only virtio-net headers that agree with the
// packet's own headers. The headers of a TUN device are looser; [Frame.Header] makes them strict before they are sent.
package packetlink
