package netfilter

import (
	"net/netip"
	"slices"

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
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16) // RFC 791
	if a.Is6() {
		family, offset = unix.NFPROTO_IPV6, 24 // RFC 8200
	}
	return slices.Concat(
		MetaIs(expr.MetaKeyNFPROTO, []byte{family}),
		[]expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset,
				Len: uint32(a.BitLen() / 8)},
			Equal(a.AsSlice()),
		})
}

// Verdict ends a rule.
func Verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

// InterfaceName returns an interface's name as the kernel compares it: padded to IFNAMSIZ.
func InterfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}
