package netstack

import (
	"net/netip"
	"sync"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"kubevpn/pkg/datapath/packet"
)

// gsoMaxSize is the longest super-packet that gVisor may build. Its IP header says at most 65535.
const gsoMaxSize = 65535

// linkEndpoint is gVisor's link endpoint on the device: super-packets go into the stack whole, and come out whole.
//
//	in:  Read ─ header checked ─┬─ copied into one right-sized, pooled buffer ─ gVisor
//	                            └─ forwarded as it is, in the buffer into which it was read
//	out: gVisor's buffers as they are ─ virtio-net header ─ one Writev
type linkEndpoint struct {
	dev        Device
	mtu        uint32
	gso, uso   bool
	forwarder  PacketForwarder
	stats      *counters
	dispatcher stack.NetworkDispatcher
}

var _ stack.LinkEndpoint = (*linkEndpoint)(nil)
var _ stack.GSOEndpoint = (*linkEndpoint)(nil)

func newLinkEndpoint(dev Device, forwarder PacketForwarder, stats *counters) *linkEndpoint {
	if forwarder == nil {
		forwarder = noForwarder(make([]byte, packet.VirtioLen+packet.MaxLen))
	}
	return &linkEndpoint{dev: dev, mtu: uint32(dev.MTU()), gso: dev.GSO(), uso: dev.USO(), forwarder: forwarder,
		stats: stats}
}

// noForwarder is the buffer of a link that forwards nothing.
type noForwarder []byte

func (b noForwarder) Buffer() []byte                  { return b }
func (b noForwarder) Forward(int, packet.Header) bool { return false }

// receive delivers packets until the device fails, and returns its error.
func (l *linkEndpoint) receive() error {
	for {
		buf := l.forwarder.Buffer()
		n, err := l.dev.Read(buf)
		if err != nil {
			return err
		}
		l.stats.packetsIn.Add(1)
		l.deliver(buf[:n])
	}
}

// deliver passes one packet, with its virtio-net header, to the forwarder, or a copy of it to gVisor.
func (l *linkEndpoint) deliver(b []byte) {
	virtio, err := packet.ParseVirtio(b)
	if err != nil || virtio.GSOType == packet.GSOUDPL4 {
		l.stats.malformed.Add(1)
		return
	}
	b = b[packet.VirtioLen:]
	h, err := packet.Parse(b)
	if err != nil {
		l.stats.malformed.Add(1)
		return
	}
	if !isUnicast(h.Src) || !isUnicast(h.Dst) {
		l.stats.ignored.Add(1)
		return
	}
	if l.forwarder.Forward(packet.VirtioLen+len(b), h) {
		l.stats.forwarded.Add(1)
		return
	}
	proto := header.IPv4ProtocolNumber
	if h.Version == 6 {
		proto = header.IPv6ProtocolNumber
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: bufferOf(b, h.Proto)})
	l.dispatcher.DeliverNetworkPacket(proto, pkt)
	pkt.DecRef()
}

// headerRoom is at least the length of any TCP packet's headers, and the size of one of gVisor's pooled buffers.
const headerRoom = 128

// bufferOf copies a packet into pooled buffers of the right size. When gVisor reads headers from a buffer to which it
// has another reference, it copies the whole buffer; so the headers of long packets get a buffer of their own.
func bufferOf(b []byte, proto uint8) buffer.Buffer {
	if proto != packet.ProtoTCP || len(b) < 4*headerRoom {
		return buffer.MakeWithView(buffer.NewViewWithData(b))
	}
	buf := buffer.MakeWithView(buffer.NewViewWithData(b[:headerRoom]))
	_ = buf.Append(buffer.NewViewWithData(b[headerRoom:])) // fails only for a nil view
	return buf
}

var limitedBroadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// isUnicast returns false for the addresses of router solicitations, multicast listener reports, mDNS and the like.
// Those packets address neighbors on a link, and the tunnel has none. Link-local addresses of IPv4 are also those of
// services that are no neighbors: metadata of clouds, caches of DNS.
func isUnicast(a netip.Addr) bool {
	return !(a.IsMulticast() || a.IsLinkLocalUnicast() && a.Is6() || a.IsUnspecified() || a.IsLoopback() ||
		a == limitedBroadcast)
}

// outBuffer holds the headers and the pieces of one write.
type outBuffer struct {
	head   [packet.VirtioLen + packet.IPv6HeaderLen + packet.FragmentHeaderLen + 8]byte
	pieces [][]byte
}

var outBuffers = sync.Pool{New: func() any { return &outBuffer{pieces: make([][]byte, 0, 8)} }}

func (o *outBuffer) release() {
	clear(o.pieces)
	o.pieces = o.pieces[:0]
	outBuffers.Put(o)
}

// write writes o.pieces as one packet.
func (l *linkEndpoint) write(o *outBuffer) error {
	if err := l.dev.Writev(o.pieces); err != nil {
		l.stats.writeErrors.Add(1)
		return err
	}
	l.stats.packetsOut.Add(1)
	return nil
}

// WritePackets implements stack.LinkWriter. gVisor calls it from many goroutines. It waits for the device.
func (l *linkEndpoint) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	for i, pkt := range packets.AsSlice() {
		out := outBuffers.Get().(*outBuffer)
		virtio := l.virtioHeader(pkt)
		virtio.Put(out.head[:])
		out.pieces = append(out.pieces, out.head[:packet.VirtioLen])
		views, skip := pkt.AsViewList()
		for v := views.Front(); v != nil; v = v.Next() {
			piece := v.AsSlice()
			if skip >= len(piece) {
				skip -= len(piece)
				continue
			}
			out.pieces = append(out.pieces, piece[skip:])
			skip = 0
		}
		err := l.write(out)
		out.release()
		if err != nil {
			return i, &tcpip.ErrAborted{}
		}
	}
	return packets.Len(), nil
}

// virtioHeader describes the work that gVisor leaves to the device: the checksum of most TCP packets, and the
// segmentation of long ones.
func (l *linkEndpoint) virtioHeader(pkt *stack.PacketBuffer) packet.Virtio {
	var v packet.Virtio
	gso := &pkt.GSOOptions
	if l.gso && gso.Type != stack.GSONone && gso.NeedsCsum {
		v.Flags = packet.VirtioNeedsChecksum
		v.ChecksumStart = gso.L3HdrLen
		v.ChecksumOffset = gso.CsumOffset
		if gso.MSS != 0 && pkt.Data().Size() > int(gso.MSS) {
			v.GSOType = packet.GSOTCPv4
			if gso.Type == stack.GSOTCPv6 {
				v.GSOType = packet.GSOTCPv6
			}
			v.HeaderLen = gso.L3HdrLen + uint16(len(pkt.TransportHeader().Slice()))
			v.GSOSize = gso.MSS
		}
	}
	return v
}

// SupportedGSO implements stack.GSOEndpoint.
func (l *linkEndpoint) SupportedGSO() stack.SupportedGSO {
	if l.gso {
		return stack.HostGSOSupported
	}
	return stack.GSONotSupported
}

// GSOMaxSize implements stack.GSOEndpoint.
func (l *linkEndpoint) GSOMaxSize() uint32 { return gsoMaxSize }

// Capabilities implements stack.LinkEndpoint. gVisor need not verify checksums: packets come from this machine's
// kernel, which omits checksums on a device with offloads.
func (l *linkEndpoint) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// Attach implements stack.LinkEndpoint. Packets are delivered by receive, in Run.
func (l *linkEndpoint) Attach(d stack.NetworkDispatcher) { l.dispatcher = d }

// The rest of stack.LinkEndpoint: a TUN device has no link layer.

func (l *linkEndpoint) IsAttached() bool                        { return l.dispatcher != nil }
func (l *linkEndpoint) MTU() uint32                             { return l.mtu }
func (l *linkEndpoint) SetMTU(mtu uint32)                       {}
func (l *linkEndpoint) MaxHeaderLength() uint16                 { return 0 }
func (l *linkEndpoint) LinkAddress() tcpip.LinkAddress          { return "" }
func (l *linkEndpoint) SetLinkAddress(tcpip.LinkAddress)        {}
func (l *linkEndpoint) Wait()                                   {}
func (l *linkEndpoint) Close()                                  {}
func (l *linkEndpoint) SetOnCloseAction(func())                 {}
func (l *linkEndpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }
func (l *linkEndpoint) AddHeader(*stack.PacketBuffer)           {}
func (l *linkEndpoint) ParseHeader(*stack.PacketBuffer) bool    { return true }
