package route

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

// newTUN creates a TUN that exists as long as the returned file is open.
func newTUN(t *testing.T, name string) *os.File {
	t.Helper()
	la := netlink.NewLinkAttrs()
	la.Name = name
	tun := &netlink.Tuntap{
		LinkAttrs: la, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI, NonPersist: true, Queues: 1,
	}
	if err := netlink.LinkAdd(tun); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tun.Fds[0].Close() })
	return tun.Fds[0]
}

// state describes everything in the namespace that a Router could change, without counters.
func state(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, cmd := range []string{
		"ip -d link", "ip addr", "ip -4 route show table all", "ip -6 route show table all", "ip -4 rule", "ip -6 rule",
	} {
		b.WriteString("# " + cmd + "\n" + testenv.Run(t, cmd))
	}
	return b.String()
}

func lines(s string) []string {
	var out []string
	for l := range strings.Lines(s) {
		out = append(out, strings.Join(strings.Fields(l), " "))
	}
	slices.Sort(out)
	return out
}

func TestRouterAppliesEachConfig(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	defer goleak.VerifyNone(t)
	before := state(t)

	tun := newTUN(t, "kubevpn0")
	r := New()
	cfg := Config{Links: []Link{{
		Name: "kubevpn0", MTU: 9000, TxQueueLen: 128,
		Addrs:  prefixes("198.19.0.1/32", "fd00:198::1/128"),
		Routes: prefixes("10.96.0.0/16", "10.244.0.0/16", "198.19.0.0/16", "fd00:10:96::/112"),
	}}}
	set := func(cfg Config) {
		t.Helper()
		applied, err := r.Set(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if len(applied.Warnings) > 0 {
			t.Errorf("warnings %q", applied.Warnings)
		}
	}
	check := func(v4, v6, addrs []string) {
		t.Helper()
		if diff := cmp.Diff(v4, lines(testenv.Run(t, "ip -4 route show dev kubevpn0"))); diff != "" {
			t.Errorf("IPv4 routes: -want +got\n%s", diff)
		}
		if diff := cmp.Diff(v6, lines(testenv.Run(t, "ip -6 route show dev kubevpn0 proto static"))); diff != "" {
			t.Errorf("IPv6 routes: -want +got\n%s", diff)
		}
		var got []string
		for _, l := range lines(testenv.Run(t, "ip addr show dev kubevpn0")) {
			if strings.HasPrefix(l, "inet") {
				got = append(got, l)
			}
		}
		if diff := cmp.Diff(addrs, got); diff != "" {
			t.Errorf("addresses: -want +got\n%s", diff)
		}
	}

	set(cfg)
	check(
		[]string{"10.244.0.0/16 proto static scope link", "10.96.0.0/16 proto static scope link", "198.19.0.0/16 proto static scope link"},
		[]string{"fd00:10:96::/112 metric 1024 pref medium"},
		[]string{"inet 198.19.0.1/32 scope global kubevpn0", "inet6 fd00:198::1/128 scope global nodad"},
	)
	link := testenv.Run(t, "ip link show dev kubevpn0")
	if !strings.Contains(link, "mtu 9000") || !strings.Contains(link, "qlen 128") || !strings.Contains(link, ",UP") {
		t.Errorf("link is %s", link)
	}
	once := state(t)
	set(cfg)
	if diff := cmp.Diff(once, state(t)); diff != "" {
		t.Errorf("the same Config again changed something: -once +twice\n%s", diff)
	}

	// Set repairs settings that another program removed.
	testenv.Run(t, "ip route del 10.96.0.0/16")
	testenv.Run(t, "ip -6 addr del fd00:198::1/128 dev kubevpn0")
	set(cfg)
	if diff := cmp.Diff(once, state(t)); diff != "" {
		t.Errorf("not repaired: -want +got\n%s", diff)
	}
	testenv.Run(t, "ip link set kubevpn0 down")
	set(cfg)
	if diff := cmp.Diff(once, state(t)); diff != "" {
		t.Errorf("not repaired after down: -want +got\n%s", diff)
	}

	cfg.Links[0].Addrs = prefixes("198.19.0.2/32")
	cfg.Links[0].Routes = prefixes("10.96.0.0/16", "10.245.0.0/16")
	cfg.Links[0].MTU, cfg.Links[0].TxQueueLen = 1500, 0
	set(cfg)
	if link := testenv.Run(t, "ip link show dev kubevpn0"); !strings.Contains(link, "qlen 128") {
		t.Errorf("the queue did not stay as it was: %s", link)
	}
	check(
		[]string{"10.245.0.0/16 proto static scope link", "10.96.0.0/16 proto static scope link"},
		nil,
		[]string{"inet 198.19.0.2/32 scope global kubevpn0"},
	)

	set(Config{})
	if got := testenv.Run(t, "ip route show table all dev kubevpn0") + testenv.Run(t, "ip -6 route show table all dev kubevpn0"); got != "" {
		t.Errorf("routes left:\n%s", got)
	}
	if got := testenv.Run(t, "ip addr show dev kubevpn0"); strings.Contains(got, "inet") {
		t.Errorf("addresses left:\n%s", got)
	}
	tun.Close()
	testenv.WaitGone(t, "kubevpn0")
	if diff := cmp.Diff(before, state(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
	if err := r.Close(); err != nil {
		t.Errorf("Close after the link has gone: %v", err)
	}
}

func TestRouterLeavesNothingWithoutTheDevice(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	before := state(t)
	tun := newTUN(t, "kubevpn0")
	r := New()
	cfg := Config{Links: []Link{{
		Name: "kubevpn0", MTU: 1500,
		Addrs: prefixes("198.19.0.1/32", "fd00:198::1/128"), Routes: prefixes("10.96.0.0/16", "fd00:10:96::/112"),
	}}}
	if _, err := r.Set(cfg); err != nil {
		t.Fatal(err)
	}
	tun.Close() // as the kernel does for a killed process
	testenv.WaitGone(t, "kubevpn0")
	if diff := cmp.Diff(before, state(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
	if _, err := r.Set(cfg); err == nil || !strings.Contains(err.Error(), "link kubevpn0: Link not found") {
		t.Errorf("Set on a link that has gone: %v", err)
	}
	// A new device of the same name is not the one that was managed: everything is set anew.
	newTUN(t, "kubevpn0")
	if _, err := r.Set(cfg); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestRouterLeavesOthersAlone(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	testenv.Run(t, "ip link add eth0 type veth peer name eth1")
	testenv.Run(t, "ip addr add 192.168.1.7/24 dev eth0")
	testenv.Run(t, "ip link set eth0 up")
	testenv.Run(t, "ip link set eth1 up")
	testenv.Run(t, "ip route add 10.96.0.0/16 via 192.168.1.1")
	newTUN(t, "kubevpn0")
	testenv.Until(t, "eth0 is up", func() bool { return !strings.Contains(testenv.Run(t, "ip route"), "linkdown") })
	before := testenv.Run(t, "ip route")

	r := New()
	_, err := r.Set(Config{Links: []Link{{Name: "kubevpn0", MTU: 1500, Routes: prefixes("10.244.0.0/16", "10.96.0.0/16")}}})
	const want = "link kubevpn0: adding route 10.96.0.0/16: eth0 already has this route"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, testenv.Run(t, "ip route")); diff != "" {
		t.Errorf("-before +after\n%s", diff)
	}
}

func TestRouterSeesPolicyRouting(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	testenv.Run(t, "ip link add eth0 type veth peer name eth1")
	testenv.Run(t, "ip addr add 192.168.1.7/24 dev eth0")
	testenv.Run(t, "ip link set eth0 up")
	testenv.Run(t, "ip link set eth1 up")
	testenv.Run(t, "ip rule add prio 100 lookup 52")
	testenv.Run(t, "ip route add default dev eth0 table 52")
	newTUN(t, "kubevpn0")
	applied, err := New().Set(Config{Links: []Link{{
		Name: "kubevpn0", MTU: 1500, Addrs: prefixes("198.19.0.1/32"),
		Routes: prefixes("198.19.0.1/32", "10.96.0.0/16"), // no packet can test the first one
	}}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"10.96.0.0/16 is routed into kubevpn0, but packets for 10.96.0.1 go to eth0: another program's ip rule or route comes first"}
	if diff := cmp.Diff(want, applied.Warnings); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestRouterWorksWithoutIPv6(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1\n"), 0); err != nil {
		t.Fatal(err)
	}
	newTUN(t, "kubevpn0")
	cfg := Config{Links: []Link{{Name: "kubevpn0", MTU: 1500, Addrs: prefixes("fd00::1/128"), Routes: prefixes("fd00:10::/64")}}}
	applied, err := New().Set(cfg)
	if err != nil || len(applied.Warnings) > 0 {
		t.Fatalf("IPv6 that is off by default is on for our own link: %v %q", err, applied.Warnings)
	}
	// The kernel removes IPv6 from a link whose MTU is below 1280.
	newTUN(t, "kubevpn1")
	testenv.Run(t, "ip link set kubevpn1 mtu 1000")
	cfg = Config{Links: []Link{{
		Name: "kubevpn1", MTU: 1000, Addrs: prefixes("198.19.0.1/32", "fd00::2/128"), Routes: prefixes("10.96.0.0/16", "fd00:11::/64"),
	}}}
	applied, err = New().Set(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(applied.Warnings) != 1 || !strings.Contains(applied.Warnings[0], "kubevpn1 carries IPv4 only") {
		t.Errorf("warnings %q", applied.Warnings)
	}
}

func TestRouterAddsManyRoutes(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	newTUN(t, "kubevpn0")
	l := Link{Name: "kubevpn0", MTU: 1500}
	for i := range 4096 {
		l.Routes = append(l.Routes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	r := New()
	if _, err := r.Set(Config{Links: []Link{l}}); err != nil {
		t.Fatal(err)
	}
	if n := len(lines(testenv.Run(t, "ip route show dev kubevpn0"))); n != 4096 {
		t.Errorf("%d routes", n)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOverlapsReadsThisMachine(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	for _, cmd := range []string{
		"ip link add eth0 type veth peer name eth1",
		"ip addr add 192.168.1.7/24 dev eth0",
		"ip -6 addr add fd12::7/64 dev eth0 nodad",
		"ip link set eth0 up",
		"ip link set eth1 up",
		"ip route add default via 192.168.1.1",
		"ip route add 10.0.0.0/8 via 192.168.1.2",
		"ip route add blackhole 10.30.30.0/24",
		"ip route add 10.40.0.0/16 nexthop via 192.168.1.2 nexthop via 192.168.1.3",
		"ip route add 192.0.2.0/24 dev eth0",
		"ip rule add prio 5270 lookup 52",
		"ip route add 100.64.0.0/10 dev eth1 table 52",
		"ip route add 203.0.113.0/24 dev eth1 table 99",
	} {
		testenv.Run(t, cmd)
	}
	newTUN(t, "kubevpn0")
	newTUN(t, "tun5")
	testenv.Run(t, "ip link set tun5 up")
	testenv.Run(t, "ip route add 10.50.0.0/16 dev tun5")
	r := New()
	if _, err := r.Set(Config{Links: []Link{{Name: "kubevpn0", MTU: 1500, Addrs: prefixes("198.19.0.1/32"), Routes: prefixes("10.96.0.0/16")}}}); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		ours   string
		ignore []string
		want   []string
	}{
		{"10.97.0.0/16", nil, nil},
		{"10.96.0.0/16", nil, []string{"10.96.0.0/16 overlaps the route 10.96.0.0/16 of kubevpn0"}},
		{"10.96.0.0/16", []string{"kubevpn0"}, nil},
		{"198.19.0.0/16", nil, []string{"198.19.0.0/16 overlaps the address 198.19.0.1/32 of kubevpn0"}},
		{"192.168.1.128/25", nil, []string{"192.168.1.128/25 overlaps the network 192.168.1.0/24 of eth0"}},
		{"192.0.2.128/25", nil, []string{"192.0.2.128/25 overlaps the network 192.0.2.0/24 of eth0"}},
		{"10.30.0.0/16", nil, []string{"10.30.0.0/16 overlaps the route 10.30.30.0/24 of no interface"}},
		{"10.40.0.0/16", nil, []string{"10.40.0.0/16 overlaps the route 10.40.0.0/16 of eth0"}},
		{"10.50.0.0/24", nil, nil},
		{"10.50.0.0/16", nil, []string{"10.50.0.0/16 overlaps the route 10.50.0.0/16 of tun5"}},
		{"100.96.0.0/16", nil, []string{"100.96.0.0/16 overlaps the ip rule 100.64.0.0/10 of eth1"}},
		{"203.0.113.0/24", nil, nil},
		{"fd12::/96", nil, []string{"fd12::/96 overlaps the network fd12::/64 of eth0", "fd12::/96 overlaps the address fd12::7/128 of eth0"}},
	}
	for _, tt := range tests {
		got, err := Overlaps(prefixes(tt.ours), tt.ignore)
		if err != nil {
			t.Fatal(err)
		}
		var text []string
		for _, c := range got {
			text = append(text, c.String())
		}
		if diff := cmp.Diff(tt.want, text); diff != "" {
			t.Errorf("%s: -want +got\n%s", tt.ours, diff)
		}
	}
}
