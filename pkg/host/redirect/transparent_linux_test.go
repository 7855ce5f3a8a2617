package redirect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
)

// transparent makes Redirects that keep clients' addresses.
func transparent(t *testing.T, name string) *Redirects {
	t.Helper()
	r := open(t, name)
	if err := r.Transparent(); err != nil {
		t.Fatal(err)
	}
	return r
}

// from sends a question to the application with Dial, as the redirector does.
func from(t *testing.T, r *Redirects, network, client, to string) string {
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	c, err := r.Dial(ctx, network, netip.MustParseAddr(client), netip.MustParseAddrPort(to))
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return ask(c)
}

func TestDialKeepsClientAddress(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	p := newPod(t)
	for _, network := range []string{"tcp", "udp"} {
		serve(t,
			server{network + "4", "0.0.0.0:80", "any", nil}, server{network, ":81", "both", nil},
			server{network, "10.1.0.2:82", "pod", nil}, server{network, "[fd00:1::2]:82", "pod", nil},
			server{network, "127.0.0.1:83", "localhost", nil}, server{network, "[::1]:83", "localhost", nil})
	}
	tests := []struct{ client, to, want string }{
		{"10.1.0.9", "10.1.0.2:80", "any 10.1.0.9"},
		{"10.1.0.9", "10.1.0.2:81", "both 10.1.0.9"},
		{"10.1.0.9", "10.1.0.2:82", "pod 10.1.0.9"},
		{"10.1.0.9", "127.0.0.1:83", "localhost 127.0.0.1"},
		{"203.0.113.7", "10.1.0.2:80", "any 203.0.113.7"},
		{"203.0.113.7", "10.1.0.2:82", "pod 203.0.113.7"},
		{"::ffff:10.1.0.9", "10.1.0.2:82", "pod 10.1.0.9"},
		{"fd00:1::9", "[fd00:1::2]:81", "both fd00:1::9"},
		{"fd00:1::9", "[fd00:1::2]:82", "pod fd00:1::9"},
		{"fd00:1::9", "[::1]:83", "localhost ::1"},
		{"2001:db8::7", "[fd00:1::2]:82", "pod 2001:db8::7"},
		// These clients have no address that an application of this family can see.
		{"fd00:1::9", "10.1.0.2:82", "pod 10.1.0.2"},
		{"fe80::9", "[fd00:1::2]:82", "pod fd00:1::2"},
		{"127.0.0.1", "10.1.0.2:82", "pod 10.1.0.2"},
		// The pod's own addresses, for example through a Service.
		{"10.1.0.2", "10.1.0.2:82", "pod 10.1.0.2"},
		{"10.1.0.3", "10.1.0.2:82", "pod 10.1.0.3"},
	}
	r := open(t, "test")
	before := func(when string) {
		t.Helper()
		for _, network := range []string{"tcp", "udp"} {
			check(t, when+": "+network, from(t, r, network, "10.1.0.9", "10.1.0.2:82"), "pod 10.1.0.2")
		}
	}
	before("before Transparent")
	if err := r.Transparent(); err != nil {
		t.Fatal(err)
	}
	if err := r.Transparent(); err != nil {
		t.Fatalf("again: %v", err)
	}
	for _, network := range []string{"tcp", "udp"} {
		for _, tt := range tests {
			check(t, network+" "+tt.client+" to "+tt.to, from(t, r, network, tt.client, tt.to), tt.want)
		}
		// A refusal reaches the client.
		for _, to := range []string{"10.1.0.2:9", "[fd00:1::2]:9", "127.0.0.1:9"} {
			client := "203.0.113.7"
			if strings.HasPrefix(to, "[") {
				client = "2001:db8::7"
			}
			if got := from(t, r, network, client, to); !strings.Contains(got, "connection refused") {
				t.Errorf("%s to %s, where nobody listens: %s", network, to, got)
			}
		}
	}
	// Clients still reach the application, and its answers reach them.
	for _, address := range []string{"10.1.0.2:82", "[fd00:1::2]:82"} {
		for _, network := range []string{"tcp", "udp"} {
			if got := p.ask(network, address); !strings.HasPrefix(got, "pod ") || strings.HasSuffix(got, "::2") || strings.HasSuffix(got, "0.2") {
				t.Errorf("%s %s from outside: %s", network, address, got)
			}
		}
	}
}

// A client's connection is redirected and then dialed to the application, which sees the client's address, also if both
// connections come from the same port of the client.
func TestDialKeepsClientAddressFromItsOwnPort(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	p := newPod(t)
	serve(t, server{TCP, ":80", "app", func(c net.Conn) string { return c.RemoteAddr().String() }})
	r := transparent(t, "test")
	serve(t, server{TCP, ":8080", "us, and", func(c net.Conn) string {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		to, err := OriginalDestination(c.(*net.TCPConn))
		if err != nil {
			return err.Error()
		}
		client := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
		out, err := r.Dial(ctx, TCP, client, to)
		if err != nil {
			return err.Error()
		}
		defer out.Close()
		return ask(out)
	}})
	set(t, r, map[Port]uint16{web: 8080})
	// The pod has one ephemeral port, and the client comes from it.
	sysctl(t, "ipv4/ip_local_port_range", "40000 40000")
	for _, tt := range []struct{ client, to, want string }{
		{"10.1.0.9", "10.1.0.2:80", "us, and app [::ffff:10.1.0.9]:40000"},
		{"203.0.113.7", "10.1.0.2:80", "us, and app [::ffff:203.0.113.7]:40000"},
		{"fd00:1::9", "[fd00:1::2]:80", "us, and app [fd00:1::9]:40000"},
	} {
		want := strings.NewReplacer("[::ffff:", "", "]", "").Replace(tt.want)
		if strings.Contains(tt.client, ":") {
			want = tt.want
		}
		c, err := p.dial("tcp", tt.to, net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(tt.client), 40000))})
		if err != nil {
			t.Errorf("%s: %v", tt.client, err)
			continue
		}
		check(t, tt.client, ask(c), want)
		c.Close()
	}
}

func TestDialCarriesManyBytes(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	newPod(t)
	r := transparent(t, "test")
	l, err := net.Listen("tcp", "10.1.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const size = 64 << 20
	received := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			received <- err
			return
		}
		defer c.Close()
		n, err := io.Copy(io.Discard, c)
		if err == nil && n != size {
			err = fmt.Errorf("%d bytes", n)
		}
		received <- err
	}()
	c, err := r.Dial(t.Context(), TCP, netip.MustParseAddr("203.0.113.7"), l.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := <-received; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MB/s", int(size/1e6/time.Since(began).Seconds()))
}

func TestTransparentNamesMissingFamily(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	r := open(t, "test")
	err := r.Transparent()
	check(t, "without an address", fmt.Sprint(err), "keeping clients' addresses: the pod has no address that a client can reach")
	testenv.Run(t, "ip link add eth0 type veth peer name peer")
	testenv.Run(t, "ip addr add 10.1.0.2/32 dev eth0")
	testenv.Run(t, "ip addr add fd00:1::2/64 dev eth0 nodad")
	testenv.Run(t, "ip link set eth0 up")
	testenv.Run(t, "ip link set peer up")
	waitLocal(t, output, "fd00:1::2")
	err = r.Transparent()
	if err == nil || !strings.Contains(err.Error(), "keeping clients' addresses in IPv4: there is no route to any other host") || strings.Contains(err.Error(), "IPv6") {
		t.Errorf("without a route: %v", err)
	}
	serve(t, server{TCP, ":80", "app", nil})
	check(t, "IPv4, which has no route", from(t, r, TCP, "203.0.113.7", "10.1.0.2:80"), "app 10.1.0.2")
	check(t, "IPv6, which has a route", from(t, r, TCP, "fd00:1::9", "[fd00:1::2]:80"), "app fd00:1::9")
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.Transparent(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestRedirectsWorkWithoutIPv6(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	p := newPod(t)
	for _, of := range []string{"all", "default", "lo", "eth0"} {
		sysctl(t, "ipv6/conf/"+of+"/disable_ipv6", "1")
	}
	serve(t, server{TCP, ":80", "app", nil})
	serve(t, redirector(8080)...)
	before := state(t)
	r := transparent(t, "test")
	set(t, r, map[Port]uint16{web: 8080})
	check(t, "IPv4", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	check(t, "keeping addresses", from(t, r, TCP, "203.0.113.7", "10.1.0.2:80"), "app 203.0.113.7")
	if n, err := Flush([]Port{web, dns}, testMark); err != nil || n != 0 {
		t.Errorf("Flush: %d, %v", n, err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, state(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
}

// state describes the rules, routes and tables of this network namespace.
func state(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, cmd := range []string{"ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all", "nft list ruleset"} {
		b.WriteString("# " + cmd + "\n" + testenv.Run(t, cmd))
	}
	return b.String()
}

// The next process removes the state of a killed one.
func TestTwoProcessesEndWithoutTakingFromEachOther(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, application(53)...)
	serve(t, server{TCP, ":9080", "second", nil})
	before := state(t)
	first := holder(t, "test-1")
	check(t, "the first", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	second := transparent(t, "test-2")
	set(t, second, map[Port]uint16{web: 9080})
	check(t, "the younger of two", p.ask("tcp", "10.1.0.2:80"), "second 10.1.0.9")
	check(t, "what it does not redirect", p.ask("udp", "10.1.0.2:53"), "us 10.1.0.9")
	set(t, second, nil)
	check(t, "the older, alone", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	set(t, second, map[Port]uint16{web: 9080})
	kill(t, first)
	check(t, "the one that is left", p.ask("tcp", "10.1.0.2:80"), "second 10.1.0.9")
	check(t, "what it does not redirect, alone", p.ask("udp", "10.1.0.2:53"), "app 10.1.0.9")
	check(t, "keeping addresses", from(t, second, TCP, "203.0.113.7", "10.1.0.2:80"), "app 203.0.113.7")

	third := transparent(t, "test-3")
	if err := third.Close(); err != nil {
		t.Fatal(err)
	}
	check(t, "keeping addresses, after another's Close", from(t, second, TCP, "203.0.113.7", "10.1.0.2:80"), "app 203.0.113.7")
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, state(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}

	// The next process may start while the last one ends.
	ending := holder(t, "test-4")
	if err := ending.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	next := transparent(t, "test-5")
	set(t, next, map[Port]uint16{web: 9080})
	testenv.Until(t, "the next one redirects", func() bool { return p.ask("tcp", "10.1.0.2:80") == "second 10.1.0.9" })
	check(t, "keeping addresses, after one that was ending", from(t, next, TCP, "203.0.113.7", "10.1.0.2:80"), "app 203.0.113.7")
	// The last process to end removes the routes, and a killed process ends when the kernel has closed its files.
	_ = ending.Wait() // "signal: killed"
	if err := next.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, state(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}

	kill(t, holder(t, "test-6"))
	if left := state(t); !strings.Contains(left, "fwmark") || strings.Contains(left, "table inet") {
		t.Errorf("a killed process leaves:\n%s", left)
	}
	if err := open(t, "test-7").Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, state(t)); diff != "" {
		t.Errorf("left behind after a killed process: -before +after\n%s", diff)
	}
}

func TestNeighborsAreRoutersAndLinkLocal(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	newPod(t)
	near, err := Neighbors(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("169.254.1.1"))
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]bool{
		"192.0.2.1": true, "10.1.0.9": true, "fd00:1::9": true, "169.254.169.252": true, "fe80::1": true,
		"192.0.2.2": false, "10.1.0.8": false, "10.1.0.2": false,
	} {
		if got := slices.ContainsFunc(near, func(p netip.Prefix) bool { return p.Contains(netip.MustParseAddr(addr)) }); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
	if len(near) != 5 {
		t.Errorf("%v", near)
	}
}

func TestFlushEndsAllConnectionsButRedirectedOnes(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	p := newPod(t)
	serve(t, append(application(80), server{"tcp4", "10.1.0.2:81", "app", nil}, server{"tcp", ":82", "app", nil})...)
	serve(t, application(53)...)
	serve(t, redirector(8080)...)
	serve(t, redirector(5353)...)
	r := open(t, "test")
	if err := r.Transparent(); err != nil {
		t.Fatal(err)
	}
	// A listener of the pod uses the port from which a client connects: Flush must not take it for the other end.
	serve(t, server{TCP, ":40000", "other", nil})

	old := map[string]net.Conn{
		"IPv4, by a socket for both": p.connect("tcp", "10.1.0.2:80"),
		"IPv6":                       p.connect("tcp", "[fd00:1::2]:80"),
		"IPv4":                       p.connect("tcp", "10.1.0.2:81"),
	}
	fixed, err := p.dial("tcp", "10.1.0.2:80", net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(10, 1, 0, 9), Port: 40000}})
	if err != nil {
		t.Fatal(err)
	}
	defer fixed.Close()
	old["from the port of a listener"] = fixed
	for _, to := range []string{"10.1.0.2:80", "127.0.0.1:80", "[::1]:80"} {
		c, err := net.Dial("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		old["within, to "+to] = c
	}
	flow, otherPort := p.connect("udp", "10.1.0.2:53"), p.connect("tcp", "10.1.0.2:82")
	for what, c := range old {
		if got := ask(c); !strings.HasPrefix(got, "app ") {
			t.Errorf("%s: %s", what, got)
		}
	}
	check(t, "UDP", ask(flow), "app 10.1.0.9")
	set(t, r, map[Port]uint16{web: 8080, dns: 5353})
	redirected := p.connect("tcp", "10.1.0.2:80")
	check(t, "redirected", ask(redirected), "us for 10.1.0.2:80")
	redirectedFlow := p.connect("udp", "10.1.0.2:53")
	check(t, "redirected UDP", ask(redirectedFlow), "us 10.1.0.9")

	// These stay: redirected connections, and those of Dial.
	kept := map[string]net.Conn{"another port": otherPort, "redirected": redirected}
	dial := func(what string, c net.Conn, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		kept[what] = c
	}
	for _, to := range []string{"10.1.0.2:80", "[fd00:1::2]:80", "127.0.0.1:80", "[::1]:80"} {
		c, err := net.Dial("tcp", to)
		dial("redirected within, to "+to, c, err)
		c, err = r.Dial(t.Context(), TCP, netip.Addr{}, netip.MustParseAddrPort(to))
		dial("Dial within, to "+to, c, err)
	}
	for client, to := range map[string]string{"203.0.113.7": "10.1.0.2:80", "2001:db8::7": "[fd00:1::2]:80"} {
		c, err := r.Dial(t.Context(), TCP, netip.MustParseAddr(client), netip.MustParseAddrPort(to))
		dial("from "+client, c, err)
	}
	keptUDP, err := r.Dial(t.Context(), UDP, netip.MustParseAddr("203.0.113.7"), netip.MustParseAddrPort("10.1.0.2:53"))
	dial("UDP from 203.0.113.7", keptUDP, err)
	answers := map[string]string{}
	for what, c := range kept {
		answers[what] = ask(c)
	}

	n, err := Flush([]Port{web, {TCP, 81}, dns}, testMark)
	if err != nil {
		t.Fatal(err)
	}
	if want := len(old) + 1; n != want { // and the UDP flow
		t.Errorf("Flush ended %d connections, want %d", n, want)
	}
	for what, c := range old {
		if got := ask(c); !strings.Contains(got, "connection reset") && !strings.Contains(got, "broken pipe") {
			t.Errorf("%s: %q", what, got)
		}
	}
	check(t, "UDP, of the same socket", ask(flow), "us 10.1.0.9")
	check(t, "redirected UDP", ask(redirectedFlow), "us 10.1.0.9")
	for what, c := range kept {
		check(t, what, ask(c), answers[what])
	}
	if n, err := Flush([]Port{web, dns}, testMark); n != 0 || err != nil {
		t.Errorf("again: %d, %v", n, err)
	}
	if _, err := Flush([]Port{{"sctp", 80}}, testMark); err == nil {
		t.Error("Flush accepted sctp")
	}
}
