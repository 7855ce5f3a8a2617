//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// overlapSuite checks that local networks stay reachable, and that networks named by the user are routed.
func overlapSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	lan := w.Config().Families()[0]

	// Add a network to the laptop in the upper half of node 1's pod range, with the router as a neighbor.
	t.Run("local_network_inside_the_pods_network_is_reported_without_mapping", func(t *testing.T) {
		pods := lan.PodRange(1)
		half := netip.PrefixFrom(at(pods, 128), 25)
		self, neighbour := at(pods, 129), at(pods, 130)
		l.must(t, "ip", "link", "add", "office0", "type", "veth", "peer", "name", "office1")
		l.finally(t, "ip", "link", "del", "office0")
		l.must(t, "ip", "link", "set", "office1", "netns", w.Config().Name+"-router")
		l.must(t, "ip", "addr", "add", netip.PrefixFrom(self, 25).String(), "dev", "office0")
		l.must(t, "ip", "link", "set", "office0", "up")
		w.onRouter(t, "ip", "addr", "add", netip.PrefixFrom(neighbour, 25).String(), "dev", "office1")
		w.onRouter(t, "ip", "link", "set", "office1", "up")
		ping := []string{"ping", "-n", "-c", "1", "-W", "3", neighbour.String()}
		l.must(t, ping...)
		before := l.snapshot(t)

		r := l.run(t, "kubevpn", "connect", "--no-map")
		way := "--exclude-cidr " + half.String()
		if r.code != int(api.ExitOverlap) || !strings.Contains(r.stderr, "office0") || !strings.Contains(r.stderr, half.String()) || !strings.Contains(r.stderr, way) {
			t.Errorf("want exit %d, office0, %s and the flag: %v", api.ExitOverlap, half, r)
		}
		if strings.Count(r.stderr, "--exclude-cidr") != 1 {
			t.Errorf("want --exclude-cidr once: %v", r)
		}
		l.sameAs(t, before)
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}

		// The suggested flag can be pasted.
		l.connect(t, append(strings.Fields(way), "--no-map")...)
		l.reaches(t)
		l.must(t, ping...)
		for _, p := range l.connection(t).CIDRs {
			if p.Overlaps(half) {
				t.Errorf("%s is routed into the tunnel", p)
			}
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})

	t.Run("later_local_network_stays_reachable", func(t *testing.T) {
		l.connect(t)
		before := l.connection(t)
		l.must(t, "ip", "link", "add", "office0", "type", "veth", "peer", "name", "office1")
		l.finally(t, "ip", "link", "del", "office0")
		l.must(t, "ip", "link", "set", "office1", "up")
		l.must(t, "ip", "addr", "add", netip.PrefixFrom(at(lan.PodRange(1), 129), 25).String(), "dev", "office0")
		l.must(t, "ip", "link", "set", "office0", "up")
		l.reaches(t)
		if now := l.connection(t); now.Status != api.StatusConnected || now.ID != before.ID {
			t.Errorf("%+v", now)
		}
		// The local network's route is more specific than that of the tunnel.
		if out := l.must(t, "ip", "route", "get", at(lan.PodRange(1), 130).String()); !strings.Contains(out, "office0") {
			t.Errorf("the local network is unreachable: %s", out)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
	})

	t.Run("extra_network_excludes_the_api_server", func(t *testing.T) {
		before := l.snapshot(t)
		l.connect(t, "--extra-cidr", lan.NodeNet.String(), "--extra-cidr", lan.Outside.String()+"/32")
		server := lan.Node(1)
		for _, p := range l.connection(t).CIDRs {
			if p.Contains(server) {
				t.Errorf("%s, which has the API server %s, is routed into the tunnel", p, server)
			}
		}
		l.onDevice(t, lan.Node(2).String(), true)
		l.onDevice(t, server.String(), false)
		l.reaches(t)
		// The session survives a new connection to the API server.
		l.must(t, "curl", "-sk", "--max-time", "5", "-o", "/dev/null", fmt.Sprintf("https://%s:%d/version", server, lab.APIPort))
		// A node, not the laptop, connects to the outside.
		out := l.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/")
		_, who, ok := strings.Cut(out, "asked by ")
		asker, err := netip.ParseAddrPort(strings.TrimSpace(who))
		if !ok || err != nil || !lan.NodeNet.Contains(asker.Addr()) {
			t.Errorf("the extra network was not reached through the cluster: %q", out)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})

	t.Run("default_route_is_not_an_extra_network", func(t *testing.T) {
		for _, wide := range []string{"0.0.0.0/0", "::/0"} {
			before := l.snapshot(t)
			r := l.run(t, "kubevpn", "connect", "-o", "json", "--extra-cidr", wide)
			said := false
			for line := range strings.Lines(r.stdout) {
				var e api.Event
				if err := json.Unmarshal([]byte(line), &e); err != nil {
					t.Fatal(err)
				}
				said = said || strings.Contains(e.Warning, wide) || e.Error != nil && strings.Contains(e.Error.Message, wide)
			}
			if !said {
				t.Errorf("connect does not say that it leaves out %s: %v", wide, r)
			}
			if out := l.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/"); !strings.Contains(out, "asked by "+lan.Laptop.String()) {
				t.Errorf("the outside is reached by another path: %q", out)
			}
			l.must(t, "kubevpn", "disconnect", "--all")
			l.sameAs(t, before)
		}
	})
}

// onDevice checks whether the laptop sends packets for an address into the tunnel.
func (l *laptop) onDevice(t *testing.T, address string, tunnel bool) {
	t.Helper()
	if out := l.must(t, "ip", "route", "get", address); strings.Contains(out, " dev "+l.connection(t).Device+" ") != tunnel {
		t.Errorf("into the tunnel: want %v: %s", tunnel, out)
	}
}

// finally runs a command on the laptop at the end of the test.
func (l *laptop) finally(t *testing.T, argv ...string) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if r := l.runContext(ctx, t, argv...); r.code != 0 {
			t.Error(r)
		}
	})
}

// onRouter runs a command on the lab's router; the command must succeed.
func (w *world) onRouter(t *testing.T, argv ...string) {
	t.Helper()
	cmd, err := w.Command(t.Context(), "router", argv...)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s on the router: %v: %s", strings.Join(argv, " "), err, out)
	}
}

// at returns the prefix's address with n as its last byte.
func at(p netip.Prefix, n byte) netip.Addr {
	b := p.Addr().AsSlice()
	b[len(b)-1] = n
	a, _ := netip.AddrFromSlice(b) // b has the length of an address
	return a
}
