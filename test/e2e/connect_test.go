//go:build e2e && linux

package e2e

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// connectSuite installs, connects twice, reads the status, disconnects, and checks that nothing is left.
func connectSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)

	t.Run("status_without_a_daemon_is_empty", func(t *testing.T) {
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}
	})
	first := l.connect(t)
	t.Logf("connect with the manager to be installed: %v", first.took.Round(time.Millisecond))

	t.Run("status_describes_the_connection", func(t *testing.T) {
		c := l.connection(t)
		if c.Status != api.StatusConnected || c.Netstack != cmp.Or(w.netstack, "gvisor") || c.NetstackReason == "" || c.Namespace != "default" {
			t.Errorf("%+v", c)
		}
		if by := c.Transport; w.transport != api.TransportPortForward && by == api.TransportAPIProxy {
			// The suite uses a chosen transport.
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
			t.Errorf("the second connect created %s in addition to %s", again, id)
		}
	})
	t.Run("disconnect_leaves_nothing", func(t *testing.T) {
		l.must(t, "kubevpn", "disconnect", l.connection(t).ID)
		l.sameAs(t, before)
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("disconnect_without_a_connection_succeeds", func(t *testing.T) {
		if r := l.run(t, "kubevpn", "disconnect", "nosuchid"); r.code != int(api.ExitNotConnected) {
			t.Error(r)
		}
	})
	t.Run("second_connect_uses_the_installed_manager", func(t *testing.T) {
		r := l.connect(t)
		t.Logf("connect with the manager running: %v", r.took.Round(time.Millisecond))
		ns := l.connection(t).ManagerNamespace
		if w.isSystem() {
			return // the namespace had to admit the gateway
		}
		if got := w.kubectl(t, "get", "namespace", ns, "-o", `jsonpath={.metadata.labels.pod-security\.kubernetes\.io/enforce}`); got != "restricted" {
			t.Errorf("pod-security.kubernetes.io/enforce of %s is %q", ns, got)
		}
	})
}
