package route

import (
	"net/netip"
	"strconv"
)

// commands returns the ifconfig(8) and route(8) calls that bring a macOS utun from one state to another. It does not
// run them, so tests can call it on any system. The zero value of from means a new link, that of to a link that is no
// longer wanted.
func commands(name string, from, to Link) [][]string {
	var out [][]string
	do := func(args ...string) { out = append(out, args) }
	if to.MTU != 0 && to.MTU != from.MTU {
		do("ifconfig", name, "mtu", strconv.Itoa(to.MTU))
	}
	for _, p := range without(to.Addrs, from.Addrs) {
		if p.Addr().Is4() {
			// A utun is point-to-point and requires a far end, for which its own address is enough.
			do("ifconfig", name, "inet", p.Addr().String(), p.Addr().String(), "netmask", "255.255.255.255", "alias")
		} else {
			do("ifconfig", name, "inet6", p.Addr().String(), "prefixlen", strconv.Itoa(p.Bits()), "alias")
		}
	}
	if from.Name == "" && to.Name != "" {
		do("ifconfig", name, "up")
	}
	for _, p := range without(to.Routes, from.Routes) {
		do("route", "-q", "-n", "add", routeFamily(p), p.String(), "-interface", name)
	}
	for _, p := range without(from.Routes, to.Routes) {
		do("route", "-q", "-n", "delete", routeFamily(p), p.String(), "-interface", name)
	}
	for _, p := range without(from.Addrs, to.Addrs) {
		if p.Addr().Is4() {
			do("ifconfig", name, "inet", p.Addr().String(), "-alias")
		} else {
			do("ifconfig", name, "inet6", p.Addr().String(), "-alias")
		}
	}
	if to.Name == "" {
		do("ifconfig", name, "down")
	}
	return out
}

func routeFamily(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "-inet"
	}
	return "-inet6"
}
