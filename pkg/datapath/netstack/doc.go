// Package netstack terminates the laptop's flows to the cluster in gVisor's TCP/IP stack, in user space, and continues
// each flow as a stream. It sits between the TUN device, to which the laptop's kernel sends packets, and the session,
// which carries streams to the cluster.
//
//	app ─ kernel ─ TUN ═ link ═ gVisor ─┬─ TCP   held SYN ─ DialTCP ─ handshake ─ two copying directions ─ Stream
//	                                    ├─ UDP   one flow per pair of addresses ─ DialUDP ─ PacketStream
//	                                    ├─ echo  one flow per pinging program ─ DialEcho ─ PacketStream
//	                                    └─ local services inside the tunnel: ListenTCP, ListenUDP
//
// A [PacketForwarder] may take whole packets before gVisor sees them, in the buffer into which they were read.
//
// The application sees only what the far end does:
//
//   - The stack answers a SYN only after the far dial has ended: success completes the handshake, a refusal becomes RST,
//     no route becomes ICMP unreachable, and after any other error the stack stays silent, as without the tunnel.
//   - FIN, RST and half-closed connections cross in both directions. A half-closed flow lives as long as its other half.
//   - The stack answers a ping when the far end's reply has arrived. It answers by itself only for the addresses of its
//     local services.
//   - The stack answers other protocols (SCTP, GRE) with ICMP protocol unreachable (parameter problem, unrecognized next
//     header, for IPv6), so that the sender learns at once that the tunnel does not carry them.
//
// The stack never drops TCP data: a direction that cannot continue stops reading from the application, which closes its
// window, or from the stream, which closes the stream's window. UDP has no windows; each flow has a queue of 8 MiB.
//
// Packets of up to 64 KiB go in and out whole (see [kubevpn/pkg/datapath/tun]). gVisor does not segment them, and does
// not verify checksums, because the packets come from this machine's kernel. A flow without data holds no buffer.
//
// UDP and echo do not use gVisor's sockets. gVisor reassembles fragments and passes datagrams to this package, which
// writes answers directly to the device.
package netstack
