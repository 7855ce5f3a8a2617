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
	"kubevpn/internal/lab"
)

// clashSuite: what the laptop reaches by itself it goes on reaching, and what the user names is routed too.
func clashSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	lan := w.Config().Families()[0]

	// A network on the laptop in the upper half of node 1's pods, with the router as a neighbour.
	t.Run("a_local_network_in_the_pods_network", func(t *testing.T) {
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

		r := l.run(t, "kubevpn", "connect")
		way := "--exclude-cidr " + half.String()
		if r.code != int(api.ExitClash) || !strings.Contains(r.stderr, "office0") || !strings.Contains(r.stderr, half.String()) || !strings.Contains(r.stderr, way) {
			t.Errorf("want exit %d, office0, %s and the way out: %v", api.ExitClash, half, r)
		}
		if strings.Count(r.stderr, "--exclude-cidr") != 1 {
			t.Errorf("one way out is enough: %v", r)
		}
		l.sameAs(t, before)
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}

		// The way out is one that can be pasted.
		l.connect(t, strings.Fields(way)...)
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

	t.Run("a_local_network_that_comes_later", func(t *testing.T) {
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
		// More specific than what the tunnel has: the local network's own.
		if out := l.must(t, "ip", "route", "get", at(lan.PodRange(1), 130).String()); !strings.Contains(out, "office0") {
			t.Errorf("the local network is cut off: %s", out)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
	})

	t.Run("an_extra_network_with_the_api_server_in_it", func(t *testing.T) {
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
		// The session goes on over a new connection to the API server too.
		l.must(t, "curl", "-sk", "--max-time", "5", "-o", "/dev/null", fmt.Sprintf("https://%s:%d/version", server, lab.APIPort))
		// The outside is asked by a node, not by the laptop.
		out := l.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/")
		_, who, ok := strings.Cut(out, "asked by ")
		asker, err := netip.ParseAddrPort(strings.TrimSpace(who))
		if !ok || err != nil || !lan.NodeNet.Contains(asker.Addr()) {
			t.Errorf("the extra network was not reached by way of the cluster: %q", out)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})

	t.Run("the_whole_world_is_not_an_extra_network", func(t *testing.T) {
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
				t.Errorf("%s is not said to be left out: %v", wide, r)
			}
			if out := l.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/"); !strings.Contains(out, "asked by "+lan.Laptop.String()) {
				t.Errorf("the outside is asked by another way: %q", out)
			}
			l.must(t, "kubevpn", "disconnect", "--all")
			l.sameAs(t, before)
		}
	})
}

// onDevice checks by which link the laptop sends to an address: the tunnel, or another.
func (l *laptop) onDevice(t *testing.T, address string, tunnel bool) {
	t.Helper()
	if out := l.must(t, "ip", "route", "get", address); strings.Contains(out, " dev "+l.connection(t).Device+" ") != tunnel {
		t.Errorf("into the tunnel: want %v: %s", tunnel, out)
	}
}

// finally runs a command on the laptop when the test has ended.
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

// onRouter runs a command on the lab's router, which has to succeed.
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

// at is the prefix's address with n in its last byte.
func at(p netip.Prefix, n byte) netip.Addr {
	b := p.Addr().AsSlice()
	b[len(b)-1] = n
	a, _ := netip.AddrFromSlice(b) // of the length that an address has
	return a
}
