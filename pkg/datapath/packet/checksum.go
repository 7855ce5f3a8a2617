package packet

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Checksum adds b to the Internet checksum sum (RFC 1071) and returns the folded sum. The result is not complemented: a
// header's field holds ^Checksum(...). b must begin at an even offset of the data that the checksum covers.
func Checksum(b []byte, sum uint16) uint16 {
	// Sums of eight bytes, with the carry added back, fold to the same result (RFC 1071, section 2).
	acc, carry := uint64(sum), uint64(0)
	for len(b) >= 32 {
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b), carry)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b[8:]), carry)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b[16:]), carry)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b[24:]), carry)
		b = b[32:]
	}
	for len(b) >= 8 {
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b), carry)
		b = b[8:]
	}
	if len(b) > 0 {
		var tail [8]byte
		copy(tail[:], b)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(tail[:]), carry)
	}
	acc, carry = bits.Add64(acc, carry, 0)
	acc += carry
	acc = acc>>32 + acc&0xffffffff
	acc = acc>>32 + acc&0xffffffff
	acc = acc>>16 + acc&0xffff
	acc = acc>>16 + acc&0xffff
	return uint16(acc)
}

// PseudoHeader returns the sum of the pseudo header with which TCP, UDP and ICMPv6 checksums begin (RFC 768; RFC 8200,
// section 8.1). length is the length of the transport header and its payload in bytes.
func PseudoHeader(proto uint8, src, dst netip.Addr, length int) uint16 {
	var b [40]byte
	n := 0
	if src.Is4() {
		s, d := src.As4(), dst.As4()
		n = copy(b[:], s[:])
		n += copy(b[n:], d[:])
	} else {
		s, d := src.As16(), dst.As16()
		n = copy(b[:], s[:])
		n += copy(b[n:], d[:])
	}
	binary.BigEndian.PutUint32(b[n:], uint32(length))
	b[n+7] = proto
	return Checksum(b[:n+8], 0)
}
