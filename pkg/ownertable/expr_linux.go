package ownertable

import (
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Join joins the parts of a rule. They use register 1.
func Join(parts ...[]expr.Any) []expr.Any { return slices.Concat(parts...) }

// Equal compares register 1.
func Equal(data []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }

// NotEqual compares register 1.
func NotEqual(data []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data} }

// Is has what comes after it hold only for packets of which that is so.
func Is(key expr.MetaKey, data []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, Equal(data)}
}

// IsNot is the opposite of Is.
func IsNot(key expr.MetaKey, data []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, NotEqual(data)}
}

// To holds for packets to an address.
func To(a netip.Addr) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16) // RFC 791
	if a.Is6() {
		family, offset = unix.NFPROTO_IPV6, 24 // RFC 8200
	}
	return Join(
		Is(expr.MetaKeyNFPROTO, []byte{family}),
		[]expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
			Equal(a.AsSlice()),
		})
}

// Verdict ends a rule.
func Verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

// Link is a link's name as the kernel compares it: padded to IFNAMSIZ.
func Link(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}
