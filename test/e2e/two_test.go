//go:build e2e && linux

package e2e

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// twoSuite connects one laptop to two clusters at once.
func twoSuite(t *testing.T, w *world) {
	other := w.second(t)
	if err := w.Join(other.Lab); err != nil {
		t.Fatal(err)
	}
	l := w.newUser(t, lab.Admin)
	// Laptops whose daemons earlier suites have killed count as other laptops for five minutes.
	if w.kubectl(t, "-n", "kubevpn", "get", "deployment", "kubevpn-traffic-manager", "--ignore-not-found", "-o", "name") != "" {
		w.kubectl(t, "-n", "kubevpn", "rollout", "restart", "deployment/kubevpn-traffic-manager")
		w.kubectl(t, "-n", "kubevpn", "rollout", "status", "deployment/kubevpn-traffic-manager", "--timeout=2m")
	}
	before := l.snapshot(t)
	there, err := other.Kubeconfig(lab.Admin)
	if err != nil {
		t.Fatal(err)
	}
	other.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: only-there, namespace: default}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
`)
	l.connect(t)
	first := l.connection(t)

	t.Run("overlapping_networks_are_rejected", func(t *testing.T) {
		pods := w.Config().Families()[0].PodRange(1)
		now := l.snapshot(t)
		r := l.run(t, "kubevpn", "connect", "--kubeconfig", there, "--no-map", "--extra-cidr", pods.String())
		failure{
			code: api.ExitOverlap, message: "overlaps .*" + strings.ReplaceAll(pods.String(), ".", `\.`), hint: "--exclude-cidr", within: 15 * time.Second,
		}.check(t, r)
		l.sameAs(t, now)
		l.reachesWeb(t, w)
	})

	second := l.connectTo(t, there)
	t.Run("status_lists_both", func(t *testing.T) {
		s := l.status(t)
		if len(s.Connections) != 2 || s.Connections[0].ID != first.ID || s.Connections[1].ID != second.ID {
			t.Fatalf("%+v", s.Connections)
		}
		for i, cluster := range []*world{w, other} {
			if c := s.Connections[i]; c.Status != api.StatusConnected || c.Cluster != cluster.Config().Name || c.Server != cluster.Config().Server() {
				t.Errorf("%+v", c)
			}
		}
		// Only the connection that loses names gets a warning, once.
		if a, b := s.Connections[0].Warnings, s.Connections[1].Warnings; len(a) != 0 || len(b) != 1 || !strings.Contains(b[0], lab.ClusterDomain) {
			t.Errorf("warnings of the first %q, of the second %q", a, b)
		}
		if first.Device == second.Device || slices.Equal(first.Addresses, second.Addresses) {
			t.Errorf("the connections share a device or addresses: %+v", s.Connections)
		}
		for _, a := range first.CIDRs {
			for _, b := range second.CIDRs {
				if a.Overlaps(b) {
					t.Errorf("%s and %s overlap", a, b)
				}
			}
		}
		if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, first.ID) || !strings.Contains(out, second.ID) {
			t.Errorf("%s", out)
		}
	})
	t.Run("both_are_reached", func(t *testing.T) {
		l.reachesWeb(t, w)
		l.reachesWeb(t, other)
	})
	t.Run("first_connection_wins_equal_names", func(t *testing.T) {
		here, only := w.clusterIP(t, "default", "web"), other.clusterIP(t, "default", "only-there")
		for name, want := range map[string]string{
			// Both clusters have the domain cluster.local and these names: the older connection wins.
			"web.default.svc.cluster.local": here, "web.default": here, "web": here,
			// Only one cluster has this name.
			"only-there.default.svc.cluster.local": only, "only-there.default": only, "only-there": only,
		} {
			if out := l.must(t, "dig", "+short", "+time=15", "+tries=1", name); !strings.HasSuffix("\n"+out, "\n"+want) {
				t.Errorf("%s is %q, want %s", name, out, want)
			}
		}
		for address, want := range map[string]string{
			here: "web.default.svc.cluster.local.", only: "only-there.default.svc.cluster.local.",
			other.clusterIP(t, "default", "web"): "web.default.svc.cluster.local.",
		} {
			if out := l.must(t, "dig", "+short", "+time=15", "+tries=1", "-x", address); out != want {
				t.Errorf("%s is %q, want %s", address, out, want)
			}
		}
		if out := l.must(t, "dig", "+time=15", "+tries=1", "nosuch.default.svc.cluster.local"); !strings.Contains(out, "status: NXDOMAIN") {
			t.Error(out)
		}
		l.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/")
	})
	t.Run("second_works_after_first_disconnects", func(t *testing.T) {
		l.must(t, "kubevpn", "disconnect", first.ID)
		if c := l.connection(t); c.ID != second.ID || c.Status != api.StatusConnected {
			t.Errorf("%+v", c)
		}
		l.reachesWeb(t, other)
		if conn, err := dialTimeout(l, w.clusterIP(t, "default", "web")+":80", time.Second); err == nil {
			conn.Close()
			t.Error("the first cluster is still reached")
		}
		// The other cluster now answers its names.
		if out, want := l.must(t, "dig", "+short", "+time=15", "+tries=1", "web.default.svc.cluster.local"), other.clusterIP(t, "default", "web"); out != want {
			t.Errorf("web is %q, want %s", out, want)
		}
	})
	t.Run("first_works_after_second_disconnects", func(t *testing.T) {
		l.connect(t)
		l.reachesWeb(t, w)
		l.reachesWeb(t, other)
		l.must(t, "kubevpn", "disconnect", second.ID)
		if c := l.connection(t); c.ID != first.ID {
			t.Errorf("%+v", c)
		}
		l.reachesWeb(t, w)
		if out, want := l.must(t, "dig", "+short", "+time=15", "+tries=1", "web"), w.clusterIP(t, "default", "web"); !strings.HasSuffix(out, want) {
			t.Errorf("web is %q, want %s", out, want)
		}
		if r := l.run(t, "dig", "+time=15", "+tries=1", "only-there.default.svc.cluster.local"); !strings.Contains(r.stdout, "status: NXDOMAIN") {
			t.Errorf("a name of the cluster that is gone: %v", r)
		}
	})
	l.must(t, "kubevpn", "disconnect", "--all")
	l.sameAs(t, before)
	t.Run("own_lost_session_is_no_other_laptop", func(t *testing.T) {
		l.connectTo(t, there) // the first network for laptops
		kill(t, l.daemonPID(t))
		l.connect(t)
		reachesLaptops(t, l.connectTo(t, there))
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
	t.Run("label_of_another_connection", func(t *testing.T) {
		failure{code: api.ExitUsage, message: "cannot end names", hint: "--name staging"}.check(t, l.run(t, "kubevpn", "connect", "--name", "com"))
		l.connect(t, "--name", "same")
		c := l.connectTo(t, there, "--name", "same")
		if c.DNS.Alias != "" || !slices.ContainsFunc(c.Warnings, func(w string) bool { return strings.Contains(w, "another connection has the name same") }) {
			t.Errorf("%q, %q", c.DNS.Alias, c.Warnings)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
	t.Run("both_connect_at_once", func(t *testing.T) {
		for range 3 {
			attempts := []*attempt{l.begin(t), l.begin(t, "--kubeconfig", there)}
			for i, a := range attempts {
				if code, last := a.end(t); code != 0 {
					t.Fatalf("connect %d: exit %d, %v\n%s", i+1, code, last.Error, &a.stderr)
				}
			}
			s := l.status(t)
			if len(s.Connections) != 2 {
				t.Fatalf("%+v", s.Connections)
			}
			a, b := s.Connections[0], s.Connections[1]
			if slices.ContainsFunc(a.Addresses, func(addr netip.Addr) bool { return slices.Contains(b.Addresses, addr) }) {
				t.Errorf("both have an address: %v, %v", a.Addresses, b.Addresses)
			}
			for _, c := range s.Connections {
				if c.Status != api.StatusConnected || !slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.Contains(c.Addresses[0]) }) {
					t.Errorf("its inner network is not routed: %+v", c)
				}
				reachesLaptops(t, c)
			}
			l.reachesWeb(t, w)
			l.reachesWeb(t, other)
			l.must(t, "kubevpn", "disconnect", "--all")
			l.sameAs(t, before)
		}
	})
}

// reachesLaptops checks that no network of other laptops counts as out of reach.
func reachesLaptops(t *testing.T, c api.Connection) {
	t.Helper()
	for _, w := range c.Warnings {
		if strings.Contains(w, "not reached") {
			t.Errorf("a warning: %s", w)
		}
	}
}

// second returns a cluster with other addresses than w's. The test stops it unless it was running before.
func (w *world) second(t *testing.T) *world {
	t.Helper()
	c := lab.Config{Name: w.Config().Name + "-two", Nodes: 1, Ranges: 3 - w.Config().Ranges, Progress: os.Stderr}
	l, err := lab.Attach(c)
	if errors.Is(err, lab.ErrNotUp) {
		l = lab.New(c)
		err = start(t, l)
	}
	if err != nil {
		t.Fatal(err)
	}
	other := &world{Lab: l}
	other.loadImage(t)
	return other
}

// connectTo connects to another cluster as well.
func (l *laptop) connectTo(t *testing.T, kubeconfig string, args ...string) api.Connection {
	t.Helper()
	known := map[string]bool{}
	for _, c := range l.status(t).Connections {
		known[c.ID] = true
	}
	l.connect(t, append(args, "--kubeconfig", kubeconfig)...)
	for _, c := range l.status(t).Connections {
		if !known[c.ID] {
			return c
		}
	}
	t.Fatal("no other connection")
	return api.Connection{}
}

// reachesWeb fetches a page from the pods and the Service of one cluster by address, and checks which cluster answers.
func (l *laptop) reachesWeb(t *testing.T, w *world) {
	t.Helper()
	hosts := strings.Fields(w.kubectl(t, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}"))
	urls := []string{"http://" + w.clusterIP(t, "default", "web") + "/"}
	for _, p := range w.pods(t, "default", "app=web") {
		urls = append(urls, "http://"+netip.AddrPortFrom(p, 8080).String()+"/")
	}
	for _, url := range urls {
		if e, err := l.get(t, url); err != nil {
			t.Error(err)
		} else if !slices.Contains(hosts, e.Host) {
			t.Errorf("%s was answered by %s, which is not in cluster %s", url, e.Host, w.Config().Name)
		}
	}
}
