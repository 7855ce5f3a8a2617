package packet

import "encoding/binary"

// Where TCP and UDP headers have their checksum, and where the flags of TCP are.
const (
	tcpHeaderLen      = 20
	tcpFlags          = 13
	tcpChecksum       = 16
	udpHeaderLen      = 8
	udpChecksum       = 6
	tcpFIN       byte = 0x01
	tcpPSH       byte = 0x08
	tcpCWR       byte = 0x80
)

// ChecksumOffset is where the transport header of a protocol has its checksum. ok is false for protocols other than
// TCP and UDP: no virtio-net header asks for the checksum of those.
func ChecksumOffset(proto uint8) (offset int, ok bool) {
	switch proto {
	case ProtoTCP:
		return tcpChecksum, true
	case ProtoUDP:
		return udpChecksum, true
	}
	return 0, false
}

// TransportLen is the length of the TCP or UDP header at the start of b. ok is false when b is not long enough to
// hold it, when it contradicts itself, and for other protocols.
func TransportLen(proto uint8, b []byte) (n int, ok bool) {
	switch proto {
	case ProtoTCP:
		if len(b) < tcpHeaderLen {
			return 0, false
		}
		n = int(b[12]>>4) * 4
		return n, n >= tcpHeaderLen && n <= len(b)
	case ProtoUDP:
		return udpHeaderLen, len(b) >= udpHeaderLen
	}
	return 0, false
}

// CompleteChecksum does in place what a virtio-net header with [VirtioNeedsChecksum] leaves to the receiver of the
// packet p. v is one that [ParseVirtio] found to fit p. It is not for super-packets: see [Split].
func CompleteChecksum(v *Virtio, p []byte) {
	sum := ^Checksum(p[v.ChecksumStart:], 0) // the field itself holds the sum of the pseudo header
	if sum == 0 {
		sum = 0xffff // the same number in ones' complement; for UDP, 0 means that there is no checksum
	}
	binary.BigEndian.PutUint16(p[int(v.ChecksumStart)+int(v.ChecksumOffset):], sum)
}

// Segments are the packets that a TCP super-packet stands for, made one after the other. They are those that Linux
// makes of it: the headers are repeated; lengths, sequence numbers, IPv4 identifications and checksums are each
// segment's own; FIN and PSH are on the last alone, CWR on the first alone.
type Segments struct {
	packet    []byte
	version   uint8
	transport int // where the TCP header begins
	payload   int // where the payload begins
	next      int // where the payload of the next segment begins
	size      int // payload of a segment
	id        uint16
	sequence  uint32
	pseudo    uint16 // sum of the pseudo header, without the length
}

// Split begins to cut up the super-packet p, which h and v describe. It does not change p and does not allocate. The
// error is [ErrVirtio].
func Split(v *Virtio, h *Header, p []byte) (Segments, error) {
	want := uint8(GSOTCPv4)
	if h.Version == 6 {
		want = GSOTCPv6
	}
	if v.GSOType&^GSOECN != want || v.GSOSize == 0 || v.Flags&VirtioNeedsChecksum == 0 || h.Proto != ProtoTCP ||
		h.IsFragment() {
		return Segments{}, ErrVirtio
	}
	p = p[:h.Len]
	tcp := p[h.HeaderLen:]
	n, ok := TransportLen(ProtoTCP, tcp)
	if !ok {
		return Segments{}, ErrVirtio
	}
	// The checksum field holds the sum of the pseudo header with the length of the whole: take that out again.
	pseudo := add(binary.BigEndian.Uint16(tcp[tcpChecksum:]), ^uint16(len(tcp)))
	return Segments{
		packet: p, version: h.Version, transport: h.HeaderLen, payload: h.HeaderLen + n, next: h.HeaderLen + n,
		size: int(v.GSOSize), id: uint16(h.ID), sequence: binary.BigEndian.Uint32(tcp[4:]), pseudo: pseudo,
	}, nil
}

// add is addition in ones' complement.
func add(a, b uint16) uint16 {
	sum := uint32(a) + uint32(b)
	return uint16(sum + sum>>16)
}

// Len is the length of the packet that [Segments.Put] makes next; 0 when there is none.
func (s *Segments) Len() int {
	if s.next >= len(s.packet) {
		return 0
	}
	return s.payload + min(s.size, len(s.packet)-s.next)
}

// Put writes the next packet to the start of b, which is no shorter than [Segments.Len], and returns its length.
func (s *Segments) Put(b []byte) int {
	n := s.Len()
	if n == 0 {
		return 0
	}
	b = b[:n]
	copy(b, s.packet[:s.payload])
	data := s.packet[s.next:min(s.next+s.size, len(s.packet))]
	copy(b[s.payload:], data)

	if s.version == 4 {
		binary.BigEndian.PutUint16(b[2:], uint16(n))
		binary.BigEndian.PutUint16(b[4:], s.id)
		b[10], b[11] = 0, 0
		binary.BigEndian.PutUint16(b[10:], ^Checksum(b[:s.transport], 0))
	} else {
		binary.BigEndian.PutUint16(b[4:], uint16(n-IPv6HeaderLen))
	}

	tcp := b[s.transport:]
	binary.BigEndian.PutUint32(tcp[4:], s.sequence)
	if s.next != s.payload {
		tcp[tcpFlags] &^= tcpCWR
	}
	if s.next+len(data) < len(s.packet) {
		tcp[tcpFlags] &^= tcpFIN | tcpPSH
	}
	tcp[tcpChecksum], tcp[tcpChecksum+1] = 0, 0
	binary.BigEndian.PutUint16(tcp[tcpChecksum:], ^Checksum(tcp, add(s.pseudo, uint16(len(tcp)))))

	s.next += len(data)
	s.sequence += uint32(len(data))
	s.id++
	return n
}
