// Package netstack ends the laptop's connections to the cluster in a TCP/IP stack of our own, gVisor's, and hands each
// of them on as a stream. It sits between the TUN device, where the laptop's kernel delivers packets, and the session,
// which carries streams to the cluster.
//
//	app ─ kernel ─ TUN ═ link ═ gVisor ─┬─ TCP   held SYN ─ DialTCP ─ handshake ─ two copying directions ─ Stream
//	                                    ├─ UDP   one flow per pair of addresses ─ DialUDP ─ PacketStream
//	                                    ├─ echo  one flow per pinging program ─ DialEcho ─ PacketStream
//	                                    └─ local services inside the tunnel: ListenTCP, ListenUDP
//
// A [Diverter] may take whole packets out before gVisor, in the buffer that they were read to.
//
// What the application sees is what the far end did, and nothing is made up on the way:
//
//   - A SYN is answered only after the far dial has ended: success completes the handshake, a refusal becomes RST, no
//     route becomes ICMP unreachable, and anything else is silence, as it would be without us.
//   - FIN, RST and half-closed connections cross in both directions. A half-closed flow lives as long as its other half.
//   - A ping is answered when the far end's answer has come back. The stack itself answers only for the addresses of its
//     local services.
//   - What cannot be carried (SCTP, GRE and all but TCP, UDP and echo) is answered with ICMP protocol unreachable
//     (parameter problem, unrecognized next header, for IPv6): the sender learns at once that this path has no such
//     protocol.
//
// Data is never dropped inside the process: a TCP direction that cannot go on stops reading, which closes the window
// towards the application, or stops taking from the stream, which closes the stream's window. UDP, which has no windows,
// has a queue of 1 MiB per flow.
//
// Packets of up to 64 KiB go in and out whole (see [kubevpn/pkg/tun]); gVisor segments nothing and, on the way in, is
// told that checksums are right, as they come from this machine's kernel. A flow without data holds no buffer.
//
// UDP and echo do not use gVisor's sockets. gVisor puts fragments together and routes datagrams to us; answers are
// written to the device directly.
package netstack
