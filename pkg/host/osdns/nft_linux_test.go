package osdns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

// ask sends one TXT query and returns the answer's text, or the error.
func ask(network string, server netip.Addr, control func(network, address string, c syscall.RawConn) error) string {
	c := &dns.Client{Net: network, Timeout: 2 * time.Second, Dialer: &net.Dialer{Timeout: 2 * time.Second, Control: control}}
	q := new(dns.Msg)
	q.SetQuestion("example.org.", dns.TypeTXT)
	m, _, err := c.Exchange(q, netip.AddrPortFrom(server, 53).String())
	if err != nil {
		return "error: " + err.Error()
	}
	if len(m.Answer) != 1 {
		return m.String()
	}
	return strings.Join(m.Answer[0].(*dns.TXT).Txt, "|")
}

// marked sets the mark on a socket, as the helper does for the resolver.
func marked(_, _ string, c syscall.RawConn) error {
	var serr error
	err := c.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(Mark))
	})
	if err != nil {
		return err
	}
	return serr
}

func both(network, who string) string { return who + " " + network }

// checkAsked asks each server over UDP and TCP, plain and marked.
func checkAsked(t *testing.T, servers []netip.Addr, plain, mark func(netip.Addr) string) {
	t.Helper()
	for _, s := range servers {
		for _, network := range []string{"udp", "tcp"} {
			if got, want := ask(network, s, nil), both(network, plain(s)); got != want {
				t.Errorf("%s to %s: %q, want %q", network, s, got, want)
			}
			if got, want := ask(network, s, marked), both(network, mark(s)); got != want {
				t.Errorf("%s to %s, marked: %q, want %q", network, s, got, want)
			}
		}
	}
}

// namespaceState describes everything that kubevpn may change in this namespace, without counters.
func namespaceState(t *testing.T, resolvConf string) string {
	t.Helper()
	var b strings.Builder
	for _, cmd := range []string{"ip addr", "ip -4 route show table all", "ip -6 route show table all", "ip rule", "ip -6 rule", "nft list ruleset"} {
		b.WriteString("# " + cmd + "\n" + testenv.Run(t, cmd))
	}
	b.WriteString(describe(t, resolvConf))
	return b.String()
}

func us(netip.Addr) string         { return "us" }
func upstream(a netip.Addr) string { return "upstream " + a.String() }

// startUs starts a resolver in the place of kubevpn's, on loopback in both families.
func startUs(t *testing.T) Config {
	t.Helper()
	cfg := Config{Listen4: netip.MustParseAddrPort("127.0.0.1:5399"), Listen6: netip.MustParseAddrPort("[::1]:5399")}
	for _, at := range []netip.AddrPort{cfg.Listen4, cfg.Listen6} {
		stop, err := serveDNS(at.String(), answerAs("us", "198.51.100.1"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
	}
	return cfg
}

func testOptions(t *testing.T, conf string) Options {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "resolv.conf")
	write(t, path, conf, 0o644)
	return Options{ResolvConf: path, StateDir: filepath.Join(dir, "state"), Bus: "unix:path=" + filepath.Join(dir, "nobus")}
}

func TestRedirectAnswersQueriesUntilClose(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "dig") {
		return
	}
	servers := addrs("192.0.2.1", "192.0.2.2", "2001:db8::1")
	startUpstream(t, "192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1")
	cfg := startUs(t)
	opt := testOptions(t, "nameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 2001:db8::1\n")
	before := namespaceState(t, opt.ResolvConf)
	checkAsked(t, servers, upstream, upstream)

	c := New(opt)
	applied, err := c.Set(cfg)
	if err != nil {
		t.Fatal(err)
	}
	want := Applied{Mode: ModeNFTables, Upstreams: port53(servers)}
	if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(applied)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	checkAsked(t, servers, us, upstream)
	// The redirect leaves alone a server that resolv.conf does not name.
	checkAsked(t, addrs("192.0.2.3"), upstream, upstream)
	if got := testenv.Run(t, "dig +short +tries=1 web.default.svc.cluster.local @192.0.2.1"); got != "198.51.100.1\n" {
		t.Errorf("dig printed %q", got)
	}
	if got := testenv.Run(t, "dig +short +tries=1 +tcp web.default.svc.cluster.local @2001:db8::1"); got != "198.51.100.1\n" {
		t.Errorf("dig +tcp printed %q", got)
	}
	wantTable := fmt.Sprintf(`table inet kubevpn-%d { # progname osdns.test
	flags owner

	chain redirect {
		type nat hook output priority -110; policy accept;
		meta mark 0x4b560035 return
		ip daddr 192.0.2.1 udp dport 53 dnat ip to 127.0.0.1:5399
		ip daddr 192.0.2.1 tcp dport 53 dnat ip to 127.0.0.1:5399
		ip daddr 192.0.2.2 udp dport 53 dnat ip to 127.0.0.1:5399
		ip daddr 192.0.2.2 tcp dport 53 dnat ip to 127.0.0.1:5399
		ip6 daddr 2001:db8::1 udp dport 53 dnat ip6 to [::1]:5399
		ip6 daddr 2001:db8::1 tcp dport 53 dnat ip6 to [::1]:5399
	}

	chain guard {
		type filter hook input priority filter; policy accept;
	}
}
`, os.Getpid())
	if diff := cmp.Diff(wantTable, strings.ReplaceAll(testenv.Run(t, "nft list ruleset"), "progname exe", "progname osdns.test")); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	// A second Set changes nothing, and other processes cannot remove the table.
	if _, err := c.Set(cfg); err != nil {
		t.Fatal(err)
	}
	testenv.Run(t, "nft flush ruleset")
	checkAsked(t, servers, us, upstream)

	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	checkAsked(t, servers, upstream, upstream)
	if diff := cmp.Diff(before, namespaceState(t, opt.ResolvConf)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
}

func TestRedirectCoversLoopbackNameservers(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	for _, at := range []string{"127.0.0.1:53", "[::1]:53", "127.0.0.53:53"} {
		stop, err := serveDNS(at, answerAs("dnsmasq", "203.0.113.2"))
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	cfg := startUs(t)
	dnsmasq := func(netip.Addr) string { return "dnsmasq" }
	servers := addrs("127.0.0.1", "::1", "127.0.0.53")
	c := New(testOptions(t, "nameserver 127.0.0.1\nnameserver ::1\nnameserver 127.0.0.53\n"))
	if _, err := c.Set(cfg); err != nil {
		t.Fatal(err)
	}
	checkAsked(t, servers, us, dnsmasq)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	checkAsked(t, servers, dnsmasq, dnsmasq)
}

func TestRedirectEndsWithItsProcess(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	startUpstream(t, "192.0.2.1")
	cfg := startUs(t)
	opt := testOptions(t, "nameserver 192.0.2.1\n")
	opt.Table = "kubevpn-1000-1"
	before := namespaceState(t, opt.ResolvConf)
	ends := map[string]func(h *holder) error{
		"SIGKILL": func(h *holder) error { return h.cmd.Process.Kill() },
		"EOF":     func(h *holder) error { return h.eof() },
		"SIGTERM": func(h *holder) error { return h.cmd.Process.Signal(syscall.SIGTERM) },
	}
	for name, end := range ends {
		h := hold(t, cfg, opt)
		checkAsked(t, addrs("192.0.2.1"), us, upstream)
		if err := end(h); err != nil {
			t.Fatal(err)
		}
		err := h.cmd.Wait()
		if name == "EOF" && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(before, namespaceState(t, opt.ResolvConf)); diff != "" {
			t.Errorf("%s left behind: -before +after\n%s", name, diff)
		}
		checkAsked(t, addrs("192.0.2.1"), upstream, upstream)
	}
}

func TestRedirectFollowsResolvConf(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	startUpstream(t, "192.0.2.1", "192.0.2.2", "192.0.2.3")
	cfg := startUs(t)
	opt := testOptions(t, "nameserver 192.0.2.1\n")
	changes := make(chan Applied, 10)
	opt.OnChange = func(a Applied) { changes <- a }
	c := New(opt)
	c.poll = 10 * time.Millisecond
	if _, err := c.Set(cfg); err != nil {
		t.Fatal(err)
	}
	next := func() string {
		t.Helper()
		select {
		case a := <-changes:
			return fmt.Sprintf("%s %v", a.Mode, a.Upstreams)
		case <-time.After(10 * time.Second):
			t.Fatal("no change was reported")
			return ""
		}
	}
	// NetworkManager replaces the file by rename.
	write(t, opt.ResolvConf+".new", "nameserver 192.0.2.2\n", 0o644)
	if err := os.Rename(opt.ResolvConf+".new", opt.ResolvConf); err != nil {
		t.Fatal(err)
	}
	if got := next(); got != "nftables [192.0.2.2:53]" {
		t.Errorf("after rename: %s", got)
	}
	checkAsked(t, addrs("192.0.2.2"), us, upstream)
	checkAsked(t, addrs("192.0.2.1"), upstream, upstream)

	// Other programs write the file in place, or replace it by a symlink to a file that they write.
	write(t, opt.ResolvConf, "nameserver 192.0.2.3\n# in place\n", 0o644)
	for got := next(); got != "nftables [192.0.2.3:53]"; got = next() {
		if got != "nftables [127.0.0.1:53]" { // the result for an empty file
			t.Errorf("after a write: %s", got)
		}
	}
	write(t, opt.ResolvConf+".target", "nameserver 192.0.2.1\n", 0o644)
	if err := os.Remove(opt.ResolvConf); err != nil {
		t.Fatal(err)
	}
	symlink(t, opt.ResolvConf+".target", opt.ResolvConf, time.Now())
	for got := next(); got != "nftables [192.0.2.1:53]"; got = next() {
		if got != "nftables [127.0.0.1:53]" { // the result without a file
			t.Errorf("after the symlink: %s", got)
		}
	}
	checkAsked(t, addrs("192.0.2.1"), us, upstream)
	write(t, opt.ResolvConf+".target", "nameserver 192.0.2.2\nnameserver 192.0.2.3\n", 0o644)
	if got := next(); got != "nftables [192.0.2.2:53 192.0.2.3:53]" {
		t.Errorf("after a write behind the symlink: %s", got)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, opt.ResolvConf+".target", "nameserver 192.0.2.1\n", 0o644)
	select {
	case a := <-changes:
		t.Errorf("after Close: %v", a)
	case <-time.After(50 * time.Millisecond):
	}
}

// The redirect also covers a program that keeps one socket for all its queries, and releases it again.
func TestRedirectCoversOpenSockets(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "conntrack") {
		return
	}
	startUpstream(t, "192.0.2.1")
	cfg := startUs(t)
	// A namespace tracks connections only once a rule asks for it: add one of another program.
	testenv.Run(t, "nft add table inet other")
	testenv.Run(t, "nft add chain inet other c { type filter hook input priority 0; }")
	testenv.Run(t, "nft add rule inet other c ct state established accept")
	conn, err := dns.Dial("udp", "192.0.2.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	asked := func() string {
		q := new(dns.Msg)
		q.SetQuestion("example.org.", dns.TypeTXT)
		m, _, err := new(dns.Client).ExchangeWithConn(q, conn)
		if err != nil || len(m.Answer) != 1 {
			return fmt.Sprint(m, err)
		}
		return strings.Join(m.Answer[0].(*dns.TXT).Txt, "|")
	}
	if got := asked(); got != "upstream 192.0.2.1 udp" {
		t.Errorf("before: %s", got)
	}
	c := New(testOptions(t, "nameserver 192.0.2.1\n"))
	if _, err := c.Set(cfg); err != nil {
		t.Fatal(err)
	}
	if got := asked(); got != "us udp" {
		t.Errorf("redirected: %s", got)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got := asked(); got != "upstream 192.0.2.1 udp" {
		t.Errorf("after: %s", got)
	}
}

// The daemons of two users have a table each. Queries go to the resolver of the later one, and each table ends alone.
func TestRedirectsOfTwoUsersCoexist(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	startUpstream(t, "192.0.2.1")
	cfg := startUs(t)
	opt := testOptions(t, "nameserver 192.0.2.1\n")
	opt.Table = "kubevpn-1000-1"
	earlier := cfg
	earlier.Listen4, earlier.Listen6 = netip.MustParseAddrPort("127.0.0.1:5398"), netip.MustParseAddrPort("[::1]:5398")
	stop, err := serveDNS(earlier.Listen4.String(), answerAs("another", "198.51.100.2"))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	another := func(netip.Addr) string { return "another" }
	first := hold(t, earlier, opt)
	checkAsked(t, addrs("192.0.2.1"), another, upstream)
	opt.Table = "kubevpn-1001-1"
	second := New(opt)
	applied, err := second.Set(cfg)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"another kubevpn (kubevpn-1000-1) already redirects this machine's DNS; its names do not resolve while this connection exists"}
	if diff := cmp.Diff(want, applied.Warnings); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	checkAsked(t, addrs("192.0.2.1"), us, upstream)
	if err := first.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.cmd.Wait()
	checkAsked(t, addrs("192.0.2.1"), us, upstream)
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	checkAsked(t, addrs("192.0.2.1"), upstream, upstream)
}

// CVE-2019-14899: a neighbour must not reach, or probe for, the address of the tunnel's link.
func TestGuardHidesTheLinksAddress(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	startUpstream(t, "192.0.2.1")
	cfg := startUs(t)
	testenv.Run(t, "ip link add kubevpn0 type veth peer name tunnel")
	for _, l := range []string{"kubevpn0", "tunnel"} {
		testenv.Run(t, "ip link set "+l+" up")
	}
	testenv.Run(t, "ip addr add 198.19.0.1/32 dev kubevpn0")
	testenv.Run(t, "ip addr add fd00:198::1/128 dev kubevpn0 nodad")
	var listener atomic.Int64
	for _, at := range []string{"198.19.0.1:7", "[fd00:198::1]:7"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				listener.Add(1)
				conn.Close()
			}
		}()
	}
	// The neighbour is a process in a namespace behind lan0 that sends to the link's address through this machine.
	neighbour := func(to string, within time.Duration) error {
		cmd := child("neighbour", to, within.String())
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		testenv.Run(t, fmt.Sprintf("ip link add lan0 type veth peer name lan1 netns %d", cmd.Process.Pid))
		testenv.Run(t, "ip link set lan0 up")
		testenv.Run(t, "ip addr add 192.0.2.129/25 dev lan0")
		testenv.Run(t, "ip addr add 2001:db8:1::1/64 dev lan0 nodad")
		stdin.Close()
		err = cmd.Wait()
		testenv.WaitGone(t, "lan0") // with the neighbour's namespace
		return err
	}
	for _, to := range []string{"198.19.0.1:7", "[fd00:198::1]:7"} {
		if err := neighbour(to, testTimeout); err != nil {
			t.Errorf("without the guard, %s is not reached from another link (so this test shows nothing): %v", to, err)
		}
	}
	cfg.Links = []Link{{Name: "kubevpn0", Addrs: addrs("198.19.0.1", "fd00:198::1")}}
	c := New(testOptions(t, "nameserver 192.0.2.1\n"))
	if _, err := c.Set(cfg); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"198.19.0.1:7", "[fd00:198::1]:7"} {
		if err := neighbour(to, 2*time.Second); err == nil { // so that a SYN is sent twice
			t.Errorf("%s is reached from another link", to)
		}
		d := net.Dialer{Timeout: 2 * time.Second}
		conn, err := d.DialContext(context.Background(), "tcp", to)
		if err != nil {
			t.Errorf("%s is not reached from this machine: %v", to, err)
			continue
		}
		conn.Close()
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}
