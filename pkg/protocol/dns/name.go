package dns

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/miekg/dns"
	"golang.org/x/net/publicsuffix"
)

// maxLabels is the number of labels of the longest short name: _http._tcp.web.billing.svc.
const maxLabels = 5

// splitKey splits a key into at most maxLabels labels; ok is false for longer names and for the root.
func splitKey(key string, labels *[maxLabels]string) (n int, ok bool) {
	if key == "" {
		return 0, false
	}
	for {
		label, rest, more := strings.Cut(key, ".")
		if n == maxLabels {
			return n, false
		}
		labels[n] = label
		n++
		if !more {
			return n, true
		}
		key = rest
	}
}

// form is the meaning of a name relative to a cluster domain (web.billing.svc), by the Kubernetes DNS specification.
type form struct {
	namespace, service string     // of a Service, one of its pods or ports
	pod                netip.Addr // of a pod by its address
}

// formOf recognises
//
//	web.billing.svc   db-0.db.billing.svc   _http._tcp.web.billing.svc   10-1-2-3.billing.pod
func formOf(labels []string) (f form, ok bool) {
	n := len(labels)
	if n < 3 || n > maxLabels {
		return form{}, false
	}
	switch labels[n-1] {
	case "svc":
		if n == 5 && !isPort(labels) {
			return form{}, false
		}
		return form{namespace: labels[n-2], service: labels[n-3]}, true
	case "pod":
		if n != 3 {
			return form{}, false
		}
		addr, ok := dashedAddr(labels[0])
		return form{pod: addr}, ok
	}
	return form{}, false
}

// isPort reports whether a name begins like that of an SRV record: _http._tcp.
func isPort(labels []string) bool {
	return strings.HasPrefix(labels[0], "_") && strings.HasPrefix(labels[1], "_")
}

// dashedAddr reads an address whose dots or colons are written as dashes: 10-1-2-3, 2001-db8--1.
func dashedAddr(label string) (netip.Addr, bool) {
	if addr, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ".")); err == nil && addr.Is4() {
		return addr, true
	}
	if addr, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ":")); err == nil && addr.Is6() &&
		addr.Zone() == "" {
		return addr, true
	}
	return netip.Addr{}, false
}

// isPlain reports whether a key contains only bytes that the names of Kubernetes objects may contain.
func isPlain(key string) bool {
	for i := range len(key) {
		switch c := key[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return true
}

// neverService reports whether a short name must never resolve to a Service: programs trust it to mean this
// machine, the network's proxy configuration or its IPv6 router, or its top-level domain is not in DNS (RFC 6761,
// RFC 6762, RFC 7686).
func neverService(labels []string) bool {
	switch labels[len(labels)-1] {
	case "localhost", "localdomain", "local", "onion", "invalid", "arpa":
		return true
	}
	return labels[0] == "wpad" || labels[0] == "isatap"
}

// isPrivateTLD reports whether networks use the label as a private top-level domain (RFC 6762 appendix G, RFC 8375,
// ICANN's "internal"). The Resolver asks the network's nameserver first for names under it, and the cluster only after
// NXDOMAIN.
func isPrivateTLD(label string) bool {
	switch label {
	case "internal", "intranet", "private", "corp", "home", "lan", "test", "example", "alt":
		return true
	}
	return false
}

// ClaimsTLD reports whether a namespace has the name of a top-level domain outside the cluster: a public one, a
// private one, or one that is not in DNS. Routing that whole domain to a [Resolver] would hide other names.
func ClaimsTLD(namespace string) bool {
	return isPublicTLD(namespace) || isPrivateTLD(namespace) || neverService([]string{namespace})
}

// isPublicTLD reports whether the label is a top-level domain of the Internet: com, dev, io.
func isPublicTLD(label string) bool {
	// The label alone is not enough: the list contains some top-level domains only as "*.ck".
	_, icann := publicsuffix.PublicSuffix("x." + label)
	return icann
}

// isZoneType reports whether resolvers ask this type of top-level domains to find their way, rather than programs
// to reach a host.
func isZoneType(qtype uint16) bool {
	switch qtype {
	case dns.TypeNS, dns.TypeSOA, dns.TypeDS, dns.TypeDNSKEY, dns.TypeRRSIG, dns.TypeNSEC, dns.TypeNSEC3:
		return true
	}
	return false
}

// ReverseAddr returns the address of a name under in-addr.arpa or ip6.arpa.
func ReverseAddr(name string) (netip.Addr, bool) {
	key, err := keyOf(strings.TrimSuffix(name, "."))
	p, ok := reversePrefix(key)
	return p.Addr(), err == nil && ok && p.IsSingleIP()
}

// reversePrefix reads the key of a name under in-addr.arpa or ip6.arpa: 3.2.1.10.in-addr.arpa is
// 10.1.2.3/32, 1.10.in-addr.arpa is 10.1.0.0/16. Labels in front of the address (b._dns-sd._udp) are ignored.
func reversePrefix(key string) (netip.Prefix, bool) {
	a, base, size := make([]byte, 4), 10, 8 // the address; the base and the bits of a label
	rest, ok := strings.CutSuffix(key, ".in-addr.arpa")
	if !ok {
		a, base, size = make([]byte, 16), 16, 4
		if rest, ok = strings.CutSuffix(key, ".ip6.arpa"); !ok {
			return netip.Prefix{}, false
		}
	}
	n := 0 // bits
	for n < 8*len(a) && rest != "" {
		dot := strings.LastIndexByte(rest, '.')
		label := rest[dot+1:]
		v, err := strconv.ParseUint(label, base, size)
		if err != nil || strconv.FormatUint(v, base) != label { // a number has one spelling: not 01
			break
		}
		a[n/8] |= byte(v) << (8 - size - n%8)
		n += size
		rest = rest[:max(dot, 0)]
	}
	addr, _ := netip.AddrFromSlice(a)
	return netip.PrefixFrom(addr, n), n > 0
}
