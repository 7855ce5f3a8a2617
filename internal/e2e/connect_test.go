//go:build e2e && linux

package e2e

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/lab"
)

// connectSuite: install, connect, connect again, status, disconnect, and nothing is left.
func connectSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)

	t.Run("status_without_a_daemon", func(t *testing.T) {
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}
	})
	first := l.connect(t)
	t.Logf("connect with the manager to be installed: %v", first.took.Round(time.Millisecond))

	t.Run("status", func(t *testing.T) {
		c := l.connection(t)
		if c.Status != api.StatusConnected || c.Netstack != cmp.Or(w.netstack, "gvisor") || c.NetstackReason == "" || c.Namespace != "default" {
			t.Errorf("%+v", c)
		}
		if by := c.Transport; w.transport != api.TransportPortForward && by == api.TransportAPIProxy {
			// Taken already.
		} else if w.transport == api.TransportAPIProxy || !strings.HasPrefix(by, "port-forward (") {
			t.Errorf("the transport is %q", by)
		}
		if !strings.HasPrefix(c.Device, "kubevpn") || len(c.CIDRs) == 0 || c.Since.IsZero() {
			t.Errorf("%+v", c)
		}
		if c.ProxyMode != string(w.Config().ProxyMode) {
			t.Errorf("proxy mode %q, kube-proxy runs in %q", c.ProxyMode, w.Config().ProxyMode)
		}
		for i, what := range []string{"name", "pod", "clusterIP"} {
			if k := c.Checks[i]; k.What != what || !k.OK {
				t.Errorf("check %s: %+v", what, k)
			}
		}
		for _, format := range []string{"table", "wide", "yaml"} {
			if out := l.must(t, "kubevpn", "status", "-o", format); !strings.Contains(out, c.ID) {
				t.Errorf("status -o %s does not name the connection:\n%s", format, out)
			}
		}
	})
	t.Run("connect_twice_is_one_connection", func(t *testing.T) {
		id := l.connection(t).ID
		l.must(t, "kubevpn", "connect")
		if again := l.connection(t).ID; again != id {
			t.Errorf("the second connect made %s beside %s", again, id)
		}
	})
	t.Run("disconnect_leaves_nothing", func(t *testing.T) {
		l.must(t, "kubevpn", "disconnect", l.connection(t).ID)
		l.sameAs(t, before)
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("disconnect_of_nothing", func(t *testing.T) {
		if r := l.run(t, "kubevpn", "disconnect", "nosuchid"); r.code != int(api.ExitNotConnected) {
			t.Error(r)
		}
	})
	t.Run("manager_is_there_the_second_time", func(t *testing.T) {
		r := l.connect(t)
		t.Logf("connect with the manager running: %v", r.took.Round(time.Millisecond))
		ns := l.connection(t).ManagerNamespace
		if w.isSystem() {
			return // it had to admit the gateway
		}
		if got := w.kubectl(t, "get", "namespace", ns, "-o", `jsonpath={.metadata.labels.pod-security\.kubernetes\.io/enforce}`); got != "restricted" {
			t.Errorf("pod-security.kubernetes.io/enforce of %s is %q", ns, got)
		}
	})
}
