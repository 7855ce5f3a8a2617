package route

import (
	"fmt"
	"net/netip"

	"go4.org/netipx"
)

// Subtract returns the addresses that are in prefixes and in no prefix of minus, as the fewest masked
// prefixes, IPv4 before IPv6, in order. Neighbours and overlaps in prefixes are merged. Neither list needs to
// be masked, sorted or free of overlaps.
func Subtract(prefixes, minus []netip.Prefix) ([]netip.Prefix, error) {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p.Masked())
	}
	for _, p := range minus {
		b.RemovePrefix(p.Masked())
	}
	s, err := b.IPSet()
	if err != nil {
		return nil, fmt.Errorf("subtracting %v from %v: %w", minus, prefixes, err)
	}
	return s.Prefixes(), nil
}
