// Package l3 carries whole IP packets between a laptop and the traffic manager over lanes: byte streams of the
// transport on which packets go as frames.
//
//	frame: uint32, big endian: length of the rest │ virtio-net header, 10 bytes │ IP packet
//
// A packet goes from one kernel to the other like this:
//
//	TUN ── read ──▶ Frame ── Sender.Send ─┬─ small: copied behind the last frame in the lane's queue
//	                (pooled)              └─ large: queued as it is
//	                                              │
//	                         lane's queue ── one Write for each buffer full of frames ──▶ stream
//	                                                                                        ║
//	TUN ◀── write ── deliver(Frame) ◀── Check ◀─┬─ small: many by one Read, copied apart ◀── stream
//	                                            └─ large: read into its Frame
//
// Super-packets stay whole: a TUN device hands out TCP segments of up to 64 KiB with the checksum left to do, and the
// kernel at the other end takes them like that, so that nobody between the two kernels sums up or cuts up anything.
// Where the other end has no such kernel (macOS, Windows), the Sender's end does that work, as Linux would.
//
// # Lanes
//
// One stream would make a keystroke wait behind an upload. So the bytes of a flow are counted as they pass: a flow that
// sends much is a bulk flow, and goes to one of the lanes 1 to 3, by its hash; all others share lane 0, where there is
// never much to wait for. A flow whose count has decayed comes back to lane 0, when the other end has what it sent before. What
// is neither TCP nor UDP goes to lane 0.
//
// So a flow keeps its order, though lanes may be on different carriers, of which one is replaced long after another: a
// barrier makes the one way sure, an acknowledgement the other (barrier.go).
//
// Send never waits. A queue that is full drops what comes, and so does one whose first frame has waited for long: that is how
// the TCP inside learns the speed of the path, and it keeps the wait short where the path is slow. A path that stands
// still is another matter: whatever comes is kept, for when it moves.
//
// # Trust
//
// What comes from a lane was written by somebody else's machine, and is on its way to a kernel. [Check] lets only those
// virtio-net headers pass that say what the packet's own headers say. A TUN device's headers are looser; [Frame.Header]
// makes them so before they are sent.
package l3
