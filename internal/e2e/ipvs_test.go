//go:build e2e && linux

package e2e

import (
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/lab"
)

// TestIPVS is the scene that kubevpn was made for: kube-proxy in IPVS mode, on nodes whose kernel has it.
func TestIPVS(t *testing.T) {
	w := newWorld(t, lab.Config{Name: "e2e-ipvs", ProxyMode: lab.ProxyIPVS})
	t.Run("kube-proxy", func(t *testing.T) {
		cmd, err := w.Command(t.Context(), "node1", "ipvsadm", "-Ln")
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.CombinedOutput()
		if vip := w.clusterIP(t, "default", "web"); err != nil || !strings.Contains(string(out), vip+":80 rr") {
			t.Fatalf("the node's virtual servers lack %s: %v\n%s", vip, err, out)
		}
		t.Logf("ipvsadm -Ln:\n%s", out)
	})
	t.Run("auto", func(t *testing.T) {
		l := w.newLaptop(t, lab.Admin)
		l.connect(t)
		if c := l.connection(t); c.Netstack != api.NetstackGVisor || c.ProxyMode != "ipvs" || !strings.Contains(c.NetstackReason, "IPVS") {
			t.Errorf("netstack %q because %q, proxy mode %q", c.Netstack, c.NetstackReason, c.ProxyMode)
		}
	})
	t.Run("gvisor", func(t *testing.T) { runSuites(t, w.in("gvisor"), everywhere) })
	t.Run("system", func(t *testing.T) { runSuites(t, w.in("system"), everywhere, whole) })
}
