package netfilter

import (
	"net"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The functions below return parts of a rule, for Table.Rule. They use register 1.

// Equal compares register 1 with data.
func Equal(data []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }

// MetaIs matches packets whose metadata key has this value.
func MetaIs(key expr.MetaKey, value []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, Equal(value)}
}

// MetaIsNot matches packets whose metadata key has another value.
func MetaIsNot(key expr.MetaKey, value []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: value}}
}

// DestinationIs matches packets to an address.
func DestinationIs(a netip.Addr) []expr.Any {
	return addressIn(netip.PrefixFrom(a, a.BitLen()), 16, 24)
}

// SourceIn matches packets from a network.
func SourceIn(p netip.Prefix) []expr.Any { return addressIn(p, 12, 8) }

// addressIn compares the address at an offset of the header: RFC 791, RFC 8200.
func addressIn(p netip.Prefix, offset4, offset6 uint32) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), offset4
	if p.Addr().Is6() {
		family, offset = unix.NFPROTO_IPV6, offset6
	}
	size := p.Addr().BitLen()
	parts := append(MetaIs(expr.MetaKeyNFPROTO, []byte{family}), &expr.Payload{DestRegister: 1,
		Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(size / 8)})
	if p.Bits() < size {
		parts = append(parts, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(size / 8),
			Mask: net.CIDRMask(p.Bits(), size), Xor: make([]byte, size/8)})
	}
	return append(parts, Equal(p.Masked().Addr().AsSlice()))
}

// Verdict ends a rule.
func Verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

// InterfaceName returns an interface's name as the kernel compares it: padded to IFNAMSIZ.
func InterfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}
