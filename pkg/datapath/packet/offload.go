package packet

import "encoding/binary"

// Offsets, in bytes, and flags of TCP and UDP headers.
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

// ChecksumOffset returns the offset of the checksum in the transport header. ok is false for protocols other than TCP
// and UDP, whose checksums a virtio-net header cannot request.
func ChecksumOffset(proto uint8) (offset int, ok bool) {
	switch proto {
	case ProtoTCP:
		return tcpChecksum, true
	case ProtoUDP:
		return udpChecksum, true
	}
	return 0, false
}

// TransportLen returns the length of the TCP or UDP header at the start of b. ok is false if b is too short, if the
// header contradicts itself, and for other protocols.
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

// CompleteChecksum completes the checksum of the packet p in place, as [VirtioNeedsChecksum] requests. [ParseVirtio]
// must have accepted v for p. For super-packets use [Split].
func CompleteChecksum(v *Virtio, p []byte) {
	sum := ^Checksum(p[v.ChecksumStart:], 0) // the field itself holds the sum of the pseudo header
	if sum == 0 {
		sum = 0xffff // the same number in ones' complement; for UDP, 0 means no checksum
	}
	binary.BigEndian.PutUint16(p[int(v.ChecksumStart)+int(v.ChecksumOffset):], sum)
}

// Segments iterates over the packets into which Linux would split a TCP super-packet. All repeat its headers. Each has
// its own lengths, sequence number, IPv4 identification and checksums. Only the last has FIN and PSH, only the first
// CWR.
type Segments struct {
	packet    []byte
	version   uint8
	transport int // offset of the TCP header
	payload   int // offset of the payload
	next      int // offset of the next segment's payload
	size      int // payload of a segment
	id        uint16
	sequence  uint32
	pseudo    uint16 // sum of the pseudo header, without the length
}

// Split returns the Segments of the super-packet p, which h and v describe. p must not change while they are in use.
// Split does not allocate. The error is [ErrVirtio].
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
	// The checksum field holds the sum of the pseudo header with the length of the whole; subtract that length.
	pseudo := add(binary.BigEndian.Uint16(tcp[tcpChecksum:]), ^uint16(len(tcp)))
	return Segments{
		packet: p, version: h.Version, transport: h.HeaderLen, payload: h.HeaderLen + n, next: h.HeaderLen + n,
		size: int(v.GSOSize), id: uint16(h.ID), sequence: binary.BigEndian.Uint32(tcp[4:]), pseudo: pseudo,
	}, nil
}

// MaxTrain is the number of segments of a UDP super-packet that every version of Linux accepts (UDP_MAX_SEGMENTS).
const MaxTrain = 64

// Train returns how many datagrams, beginning with the first, one UDP super-packet can hold, and the sum of their
// sizes. All but the last have the same size, and the last is no longer. The sum is at most limit, unless n is 1.
func Train(sizes []int, limit int) (n, sum int) {
	for n < len(sizes) && n < MaxTrain {
		if n > 0 && (sizes[n] == 0 || sizes[n] > sizes[0] || sum+sizes[n] > limit) {
			break
		}
		sum += sizes[n]
		n++
		if sizes[n-1] < sizes[0] || sizes[0] == 0 {
			break
		}
	}
	return n, sum
}

// add adds in ones' complement.
func add(a, b uint16) uint16 {
	sum := uint32(a) + uint32(b)
	return uint16(sum + sum>>16)
}

// Len returns the length of the next packet, or 0 if there is none.
func (s *Segments) Len() int {
	if s.next >= len(s.packet) {
		return 0
	}
	return s.payload + min(s.size, len(s.packet)-s.next)
}

// Put writes the next packet to the start of b, whose length is at least [Segments.Len], and returns the packet's
// length. It returns 0 if there is none.
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
