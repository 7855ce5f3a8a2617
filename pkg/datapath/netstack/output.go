package netstack

import (
	"errors"
	"math/rand/v2"
	"net/netip"

	"kubevpn/pkg/datapath/packet"
)

// This file writes UDP, echo replies and ICMP errors without gVisor.

// errTooLong is the error for a datagram that no IP packet can hold.
var errTooLong = errors.New("datagram is too long for an IP packet")

// sendUDP writes one datagram to the application, in fragments if it is longer than the MTU.
func (l *linkEndpoint) sendUDP(src, dst netip.AddrPort, payload []byte) error {
	// The kernel completes the checksum if it needs it at all. It cannot do so for fragments.
	partial := l.gso && l.fits(src.Addr(), len(payload))
	h := transportHeader{proto: packet.ProtoUDP, bytes: packet.UDP(src, dst, payload, partial), checksum: -1}
	if partial {
		h.checksum = udpChecksum
	}
	return l.sendDatagram(src.Addr(), dst.Addr(), h, payload)
}

// fits reports whether a packet with a UDP datagram of n bytes is no longer than the MTU.
func (l *linkEndpoint) fits(src netip.Addr, n int) bool { return ipHeaderLen(src)+8+n <= int(l.mtu) }

// maxTrain bounds the bytes that sendTrain can send: an IPv4 packet holds no more.
const maxTrain = 65535 - packet.IPv4HeaderLen - 8

// sendTrain writes several datagrams to the application as one super-packet, which the kernel splits again. payload
// holds them one behind the other. Each has size bytes, except that the last may be shorter. The device takes UDP
// super-packets, and datagrams of that size fit.
func (l *linkEndpoint) sendTrain(src, dst netip.AddrPort, payload []byte, size int) error {
	h := transportHeader{proto: packet.ProtoUDP, bytes: packet.UDP(src, dst, payload, true), checksum: udpChecksum}
	return l.sendPacket(src.Addr(), dst.Addr(), h, payload, size)
}

// sendEchoReply writes the reply of src to an echo request of dst.
func (l *linkEndpoint) sendEchoReply(src, dst netip.Addr, ident, sequence uint16, payload []byte) error {
	h := transportHeader{packet.ProtoICMP, packet.EchoReply(src, dst, ident, sequence, payload), -1}
	if src.Is6() {
		h.proto = packet.ProtoICMPv6
	}
	return l.sendDatagram(src, dst, h, payload)
}

// transportHeader is the header of a UDP datagram or an echo reply.
type transportHeader struct {
	proto uint8
	bytes [8]byte
	// checksum is the offset of a checksum that holds only the sum of the pseudo header; -1: the checksum is complete.
	checksum int
}

// udpChecksum is the offset of the checksum in a UDP header.
const udpChecksum = 6

// sendDatagram writes an IP packet, in fragments if it is longer than the MTU.
func (l *linkEndpoint) sendDatagram(src, dst netip.Addr, h transportHeader, payload []byte) error {
	header, length := ipHeaderLen(src), len(h.bytes)+len(payload)
	limit := 65535
	if src.Is4() {
		limit -= header
	}
	if length > limit {
		return errTooLong
	}
	if header+length > int(l.mtu) {
		return l.sendFragments(src, dst, h, payload)
	}
	return l.sendPacket(src, dst, h, payload, 0)
}

// sendPacket writes one IP packet. If segment is not 0, it is a super-packet of datagrams of that size.
func (l *linkEndpoint) sendPacket(src, dst netip.Addr, h transportHeader, payload []byte, segment int) error {
	header, length := ipHeaderLen(src), len(h.bytes)+len(payload)
	out := outBuffers.Get().(*outBuffer)
	defer out.release()
	var virtio packet.Virtio
	if h.checksum >= 0 {
		virtio.Flags = packet.VirtioNeedsChecksum
		virtio.ChecksumStart = uint16(header)
		virtio.ChecksumOffset = uint16(h.checksum)
	}
	if segment > 0 {
		virtio.GSOType, virtio.GSOSize = packet.GSOUDPL4, uint16(segment)
		virtio.HeaderLen = uint16(header + len(h.bytes))
	}
	virtio.Put(out.head[:])
	ip := packet.Outgoing{Src: src, Dst: dst, Proto: h.proto, PayloadLen: length}
	out.pieces = append(out.pieces, append(ip.Append(out.head[:packet.VirtioLen]), h.bytes[:]...))
	if len(payload) > 0 {
		out.pieces = append(out.pieces, payload)
	}
	return l.write(out)
}

func (l *linkEndpoint) sendFragments(src, dst netip.Addr, h transportHeader, payload []byte) error {
	header := ipHeaderLen(src)
	if src.Is6() {
		header += packet.FragmentHeaderLen
	}
	room := (int(l.mtu) - header) &^ 7
	length := len(h.bytes) + len(payload)
	ip := packet.Outgoing{Src: src, Dst: dst, Proto: h.proto, Fragment: true, ID: rand.Uint32()}
	for ip.FragmentOffset < length {
		ip.PayloadLen = min(room, length-ip.FragmentOffset)
		ip.MoreFragments = ip.FragmentOffset+ip.PayloadLen < length
		out := outBuffers.Get().(*outBuffer)
		clear(out.head[:packet.VirtioLen])
		headers, n := ip.Append(out.head[:packet.VirtioLen]), ip.PayloadLen
		if ip.FragmentOffset == 0 {
			headers = append(headers, h.bytes[:]...)
			n -= len(h.bytes)
		}
		out.pieces = append(out.pieces, headers)
		out.pieces = append(out.pieces, payload[:n])
		err := l.write(out)
		out.release()
		if err != nil {
			return err
		}
		payload = payload[n:]
		ip.FragmentOffset += ip.PayloadLen
	}
	return nil
}

// sendError writes an ICMP error to the sender of original, which may be only the beginning of a packet. from, the
// source of the error, is the address that was not reached.
func (l *linkEndpoint) sendError(reason packet.Reason, from netip.Addr, original []byte) error {
	buf, err := packet.AppendError(make([]byte, packet.VirtioLen, packet.VirtioLen+1280), reason, from, original)
	if err != nil {
		return err
	}
	out := outBuffers.Get().(*outBuffer)
	defer out.release()
	out.pieces = append(out.pieces, buf)
	return l.write(out)
}

func ipHeaderLen(a netip.Addr) int {
	if a.Is4() {
		return packet.IPv4HeaderLen
	}
	return packet.IPv6HeaderLen
}
