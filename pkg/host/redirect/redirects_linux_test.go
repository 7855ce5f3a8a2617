package redirect

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/unixsocket"
)

var web, dns = Port{TCP, 80}, Port{UDP, 53}

func TestOnlyChosenPortsAreRedirected(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	p := newPod(t)
	// Use checksums as on a wire if ethtool exists: by default veth computes and checks none.
	if _, err := exec.LookPath("ethtool"); err == nil {
		p.client.Run("ethtool", "-K", "veth0", "tx", "off", "rx", "off")
		testenv.Run(t, "ethtool -K eth0 tx off rx off")
	}
	serve(t, application(80)...)
	serve(t, application(81)...)
	serve(t, application(53)...)
	serve(t, redirector(8080)...)
	serve(t, redirector(5353)...)
	tests := []struct{ network, address, before, redirected string }{
		{"tcp", "10.1.0.2:80", "app 10.1.0.9", "us for 10.1.0.2:80"},
		{"tcp", "10.1.0.3:80", "app 10.1.0.9", "us for 10.1.0.3:80"},
		{"tcp", "[fd00:1::2]:80", "app fd00:1::9", "us for [fd00:1::2]:80"},
		{"udp", "10.1.0.2:53", "app 10.1.0.9", "us 10.1.0.9"},
		{"udp", "[fd00:1::2]:53", "app fd00:1::9", "us fd00:1::9"},
		// Other ports, and the same ports of the other protocol.
		{"tcp", "10.1.0.2:81", "app 10.1.0.9", "app 10.1.0.9"},
		{"tcp", "[fd00:1::2]:53", "app fd00:1::9", "app fd00:1::9"},
		{"udp", "10.1.0.2:80", "app 10.1.0.9", "app 10.1.0.9"},
	}
	before := func(when string) {
		t.Helper()
		for _, tt := range tests {
			check(t, when+": "+tt.network+" "+tt.address, p.ask(tt.network, tt.address), tt.before)
		}
	}
	before("before New")
	r := open(t, "test")
	before("before Set")
	set(t, r, map[Port]uint16{web: 8080, dns: 5353})
	for _, tt := range tests {
		check(t, tt.network+" "+tt.address, p.ask(tt.network, tt.address), tt.redirected)
	}
	c, err := p.dial("udp", "10.1.0.2:53", net.Dialer{Control: noChecksum})
	if err != nil {
		t.Fatal(err)
	}
	check(t, "a datagram without a checksum", ask(c), "us 10.1.0.9")
	c.Close()
	for _, to := range []string{"10.1.0.2:53", "[fd00:1::2]:53"} {
		if got := askAt(p.connect("udp", to), 20000, timeout); !strings.HasPrefix(got, "us ") {
			t.Errorf("a datagram in fragments to %s: the answer is %s", to, got)
		}
	}

	// A datagram to the local port itself does not count as redirected, as for TCP.
	for _, to := range []string{"10.1.0.2:5353", "[fd00:1::2]:5353"} {
		if got := askAt(p.connect("udp", to), 1, 300*time.Millisecond); strings.HasPrefix(got, "us ") {
			t.Errorf("a datagram to the local port %s counts as redirected: %s", to, got)
		}
	}

	// From within the pod as well, except for what Dial sends.
	for _, tt := range []struct{ network, address, redirected, dialed string }{
		{"tcp", "127.0.0.1:80", "us for 127.0.0.1:80", "app 127.0.0.1"},
		{"tcp", "[::1]:80", "us for [::1]:80", "app ::1"},
		{"tcp", "10.1.0.2:80", "us for 10.1.0.2:80", "app 10.1.0.2"},
		{"tcp", "[fd00:1::2]:80", "us for [fd00:1::2]:80", "app fd00:1::2"},
		{"udp", "127.0.0.1:53", "us 127.0.0.1", "app 127.0.0.1"},
		{"udp", "[::1]:53", "us ::1", "app ::1"},
		{"udp", "10.1.0.2:53", "us 10.1.0.2", "app 10.1.0.2"},
		{"udp", "[fd00:1::2]:53", "us fd00:1::2", "app fd00:1::2"},
		{"tcp", "127.0.0.123:80", "us for 127.0.0.123:80", "app 127.0.0.1"},
		{"tcp", "127.0.0.1:81", "app 127.0.0.1", "app 127.0.0.1"},
		{"udp", "127.0.0.1:80", "app 127.0.0.1", "app 127.0.0.1"},
	} {
		check(t, "within: "+tt.network+" "+tt.address, within(tt.network, tt.address, net.Dialer{}), tt.redirected)
		for _, mark := range []uint32{testMark, testMark + 1} {
			d := net.Dialer{Control: unixsocket.DialControl(func(fd int) error { return setMark(fd, mark) })}
			check(t, "marked: "+tt.network+" "+tt.address, within(tt.network, tt.address, d), tt.dialed)
		}
	}
	for _, tt := range [][2]string{{"tcp", "127.0.0.1:80"}, {"udp", "127.0.0.1:53"}} { // such as a probe that runs a command
		cmd := child("ask", tt[:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &nobody}
		out, err := cmd.Output()
		check(t, fmt.Sprintf("of an exempt user: %s %v", tt[0], err), strings.TrimSpace(string(out)), "app 127.0.0.1")
	}
	mesh := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 6)}}
	check(t, "what a mesh's proxy passes on", within("tcp", "127.0.0.1:80", mesh), "app 127.0.0.6")

	if diff := cmp.Diff(listed, testenv.Ruleset(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	// Invalid ports change nothing, and neither do the same ports again.
	for _, ports := range []map[Port]uint16{
		{{"sctp", 80}: 8080}, {web: 0}, {{TCP, 0}: 8080}, {web: 80}, {dns: 5353, {UDP, 54}: 5353},
	} {
		if err := r.Set(ports); err == nil {
			t.Errorf("Set accepted %v", ports)
		}
	}
	set(t, r, map[Port]uint16{web: 8080, dns: 5353})
	if diff := cmp.Diff(listed, testenv.Ruleset(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	set(t, r, nil)
	before("after Set of nothing")
	set(t, r, map[Port]uint16{web: 8080, dns: 5353})
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	before("after Close")
	check(t, "the ruleset", testenv.Ruleset(t), "")
	if err := r.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
	if err := r.Set(nil); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Set after Close: %v", err)
	}
}

// listed is the output of nft for the redirects of TestOnlyChosenPortsAreRedirected.
const listed = `table inet test {
	flags owner

	map tcp {
		type inet_service : inet_service
		elements = { 80 : 8080 }
	}

	map udp {
		type inet_service : inet_service
		elements = { 53 : 5353 }
	}

	map udp-back {
		type inet_service : inet_service
		elements = { 5353 : 53 }
	}

	chain tcp {
		type nat hook prerouting priority dstnat + 10; policy accept;
		iifname != "lo" fib daddr type local tcp flags syn / fin,syn,rst,ack dnat to :tcp dport map @tcp
	}

	chain udp {
		type filter hook prerouting priority dstnat - 10; policy accept;
		meta l4proto udp iifname != "lo" fib daddr type local drop
		meta l4proto udp iifname != "lo" fib daddr type local ct status ! confirmed ct mark set 0x4b560100
		ct mark 0x4b560100 ct direction original udp checksum 0 udp dport set udp dport map @udp accept
		ct mark 0x4b560100 ct direction original udp dport set udp dport map @udp
	}

	chain output {
		type filter hook output priority raw; policy accept;
		udp sport set udp sport map @udp-back
	}

	chain tcp-within {
		type nat hook output priority -90; policy accept;
		meta skuid 65534 accept
		fib daddr type local ip saddr 127.0.0.6 accept
		fib daddr type local meta mark != 0x4b560100 meta mark != 0x4b560101 tcp flags syn / fin,syn,rst,ack dnat to :tcp dport map @tcp
	}

	chain udp-within {
		type filter hook output priority -110; policy accept;
		meta skuid 65534 accept
		meta l4proto udp fib daddr type local meta mark != 0x4b560100 meta mark != 0x4b560101 ct status ! confirmed ct mark set 0x4b560100
	}
}
`

// Earlier connections stay with the application, also if the kernel did not track them before New. Redirected ones
// stay redirected.
func TestOpenConnectionsStay(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, application(53)...)
	serve(t, redirector(8080)...)
	serve(t, redirector(5353)...)
	var open4, open6 [2]net.Conn
	dial := func(i int) {
		open4[i], open6[i] = p.connect("tcp", "10.1.0.2:80"), p.connect("tcp", "[fd00:1::2]:80")
		check(t, "IPv4", ask(open4[i]), "app 10.1.0.9")
		check(t, "IPv6", ask(open6[i]), "app fd00:1::9")
	}
	dial(0)
	r := open(t, "test")
	dial(1)
	flow := p.connect("udp", "10.1.0.2:53")
	check(t, "UDP", ask(flow), "app 10.1.0.9")

	set(t, r, map[Port]uint16{web: 8080, dns: 5353})
	for i := range open4 {
		check(t, fmt.Sprintf("IPv4 %d", i), ask(open4[i]), "app 10.1.0.9")
		check(t, fmt.Sprintf("IPv6 %d", i), ask(open6[i]), "app fd00:1::9")
	}
	check(t, "UDP", ask(flow), "app 10.1.0.9")
	redirected, redirectedFlow := p.connect("tcp", "10.1.0.2:80"), p.connect("udp", "10.1.0.2:53")
	check(t, "new TCP", ask(redirected), "us for 10.1.0.2:80")
	check(t, "new UDP", ask(redirectedFlow), "us 10.1.0.9")

	set(t, r, nil)
	check(t, "redirected TCP, afterwards", ask(redirected), "us for 10.1.0.2:80")
	check(t, "redirected UDP, afterwards", ask(redirectedFlow), "app 10.1.0.9")
	check(t, "new TCP, afterwards", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")
}

// While other redirects come and go, every connection to a redirected port is redirected.
func TestSetIsAtomic(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, application(53)...)
	serve(t, redirector(8080)...)
	serve(t, redirector(5353)...)
	r := open(t, "test")
	set(t, r, map[Port]uint16{web: 8080, dns: 5353})
	ctx, stop := context.WithCancel(t.Context())
	var sets atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			n := sets.Add(1)
			if err := r.Set(map[Port]uint16{web: 8080, dns: 5353, {TCP, uint16(1000 + n%2)}: 8080}); err != nil {
				t.Error(err)
				stop()
			}
		}
	})
	asks := 0
	for ; (asks < 300 || sets.Load() < 50) && ctx.Err() == nil && !t.Failed(); asks++ {
		check(t, "TCP", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
		check(t, "IPv6", p.ask("tcp", "[fd00:1::2]:80"), "us for [fd00:1::2]:80")
		check(t, "UDP", p.ask("udp", "10.1.0.2:53"), "us 10.1.0.9")
	}
	stop()
	wg.Wait()
	t.Logf("%d changes while asked %d times", sets.Load(), asks)
}

// The application gets its ports back at once, also for clients that keep their UDP socket, and whether or not other
// NAT rules keep the kernel's NAT active.
func TestKilledProcessGivesPortsBack(t *testing.T) {
	if !testenv.InNamespace(t, "iptables-nft") {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, application(53)...)
	for _, name := range []string{"alone", "beside-iptables"} {
		if name == "beside-iptables" {
			testenv.Run(t, "iptables-nft -t nat -A PREROUTING -p tcp --dport 9 -j REDIRECT --to-ports 81")
		}
		h := holder(t, name)
		flow := p.connect("udp", "10.1.0.2:53")
		idle := p.connect("tcp", "10.1.0.2:80")
		check(t, name+": TCP", ask(idle), "us for 10.1.0.2:80")
		check(t, name+": UDP", ask(flow), "us 10.1.0.9")
		neighbor, err := net.Dial("udp", "127.0.0.1:53")
		if err != nil {
			t.Fatal(err)
		}
		defer neighbor.Close()
		check(t, name+": TCP within", within("tcp", "127.0.0.1:80", net.Dialer{}), "us for 127.0.0.1:80")
		check(t, name+": UDP within", ask(neighbor), "us 127.0.0.1")
		kill(t, h)
		check(t, name+": TCP, killed", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")
		check(t, name+": IPv6, killed", p.ask("tcp", "[fd00:1::2]:80"), "app fd00:1::9")
		check(t, name+": UDP, killed", p.ask("udp", "10.1.0.2:53"), "app 10.1.0.9")
		check(t, name+": UDP of the same socket, killed", ask(flow), "app 10.1.0.9")
		check(t, name+": TCP within, killed", within("tcp", "127.0.0.1:80", net.Dialer{}), "app 127.0.0.1")
		check(t, name+": UDP within, killed", ask(neighbor), "app 127.0.0.1")
		// A client that only reads gets an error.
		if _, err := idle.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: a connection that was redirected: %v", name, err)
		}
		idle.Close()
	}
}

// A connection that may only ask whether the application listens is answered as without a redirect.
func TestChecksSeeWhetherTheApplicationListens(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	p := newPod(t)
	serve(t, redirector(8080)...)
	serve(t, application(80)...)
	r, err := New(Config{Name: "test", Mark: testMark, Checks: Checks{Ports: []uint16{80, 81}, From: []netip.Prefix{
		netip.MustParsePrefix("10.1.0.9/32"), netip.MustParsePrefix("fd00:1::/64"),
	}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	set(t, r, map[Port]uint16{web: 8080, {TCP, 81}: 8080, {TCP, 82}: 8080})
	routed := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(203, 0, 113, 7)}} // by the node, from another host
	asks := func(port, want string) {
		t.Helper()
		for _, to := range []string{"10.1.0.2:" + port, "[fd00:1::2]:" + port} {
			if got := p.ask("tcp", to); !strings.HasSuffix(got, want) || want == "" && got != "us for "+to {
				t.Errorf("from the node to %s: %s", to, got)
			}
		}
		c, err := p.dial("tcp", "10.1.0.2:"+port, routed)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		check(t, "from elsewhere to "+port, ask(c), "us for 10.1.0.2:"+port)
	}
	asks("80", "")
	asks("81", "connection refused")
	asks("82", "") // the kubelet does not check it
	later := server{TCP, ":81", "app", nil}
	stop, err := later.start()
	if err != nil {
		t.Fatal(err)
	}
	asks("81", "")
	stop()
	asks("81", "connection refused")
	set(t, r, nil)
	check(t, "after Set of nothing", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")
}

// If another program redirects the same port, for example a mesh, its redirect comes first.
func TestRedirectsOfOthersStay(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "iptables-nft", "ip6tables-nft") {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, redirector(8080)...)
	serve(t, server{TCP, ":15006", "mesh", nil})
	for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
		testenv.Run(t, program+" -t nat -A PREROUTING -p tcp -j REDIRECT --to-ports 15006")
	}
	r := open(t, "test")
	check(t, "theirs", p.ask("tcp", "10.1.0.2:80"), "mesh 10.1.0.9")
	set(t, r, map[Port]uint16{web: 8080})
	check(t, "theirs and ours", p.ask("tcp", "10.1.0.2:80"), "mesh 10.1.0.9")
	check(t, "theirs and ours, IPv6", p.ask("tcp", "[fd00:1::2]:80"), "mesh fd00:1::9")
	check(t, "theirs, another port", p.ask("tcp", "10.1.0.2:81"), "mesh 10.1.0.9")
	check(t, "within", within("tcp", "10.1.0.2:80", net.Dialer{}), "us for 10.1.0.2:80")
	for _, program := range []string{"iptables-nft", "ip6tables-nft"} { // theirs, except for our port
		testenv.Run(t, program+" -t nat -R PREROUTING 1 -p tcp ! --dport 80 -j REDIRECT --to-ports 15006")
	}
	check(t, "ours", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	check(t, "ours, IPv6", p.ask("tcp", "[fd00:1::2]:80"), "us for [fd00:1::2]:80")
	check(t, "theirs, another port", p.ask("tcp", "10.1.0.2:81"), "mesh 10.1.0.9")
	testenv.Run(t, "nft flush ruleset")
	check(t, "ours, after all others were flushed", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	check(t, "theirs, flushed", p.ask("tcp", "10.1.0.2:81"), "dial tcp 10.1.0.2:81: connect: connection refused")
}

func TestNewNamesTheReason(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	open(t, "test")
	_, err := New(Config{Name: "test", Mark: testMark})
	check(t, "a name that is taken", fmt.Sprint(err), "cannot create the nftables table test: another process owns it: "+
		"netlink receive: operation not permitted")
	cmd := child("unprivileged")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &nobody}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	check(t, "without a capability", strings.TrimSpace(string(out)), "cannot create the nftables table test: "+
		"the capability NET_ADMIN is missing: netlink receive: operation not permitted")
}
