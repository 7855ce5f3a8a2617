package manager

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
)

// A Service without endpoints is refused only if the manager watches its namespace. Else kube-proxy may know more.
func TestServicesOfOtherNamespacesAreDialedAsTheyAre(t *testing.T) {
	vip := netip.MustParseAddrPort(managertest.TCPPod(t, func(c *net.TCPConn) { io.Copy(c, c) }))
	hidden := managertest.WebService(func(s *corev1.Service) {
		s.Namespace, s.Spec.ClusterIP, s.Spec.ClusterIPs = "hidden", vip.Addr().String(), []string{vip.Addr().String()}
	})
	everywhere := []string{"list services", "watch services", "list endpointslices", "watch endpointslices"}
	for namespace, want := range map[string]bool{"default": true, "hidden": false} {
		t.Run("watches "+namespace, func(t *testing.T) {
			r := start(t, Config{Kube: managertest.NewFakeAPI(everywhere, append(managertest.Objects(), hidden)...), NodeName: "n1",
				WatchNamespaces: []string{namespace}})
			managertest.Hello(t, r.laptop, helloV1).UntilNames()
			if _, err := r.open(t, vip.String()); (err == nil) != want {
				t.Errorf("dialing the ClusterIP of hidden/web: %v", err)
			}
		})
	}
}

func TestReadyzFollowsTheAPIServer(t *testing.T) {
	get := func(url string) (int, string) {
		resp, err := http.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	defer http.DefaultClient.CloseIdleConnections()
	kube := managertest.NewFakeAPI(nil)
	kube.Down = true
	r := start(t, Config{Kube: kube})
	if code, _ := get(r.health + "/livez"); code != 200 {
		t.Errorf("livez: %d", code)
	}
	if code, body := get(r.health + "/readyz"); code != 503 {
		t.Errorf("readyz before anything is known: %d %s", code, body)
	}
	kube.Set(func() { kube.Down = false })
	testenv.Until(t, "ready", func() bool {
		code, _ := get(r.health + "/readyz")
		return code == 200
	})
	if code, _ := get(r.health + "/"); code != 404 {
		t.Errorf("anything else: %d", code)
	}
}

func TestManagerWithoutAPIAccessIsReady(t *testing.T) {
	r := start(t, Config{})
	select {
	case <-r.watch.Ready:
	case <-time.After(managertest.Timeout):
		t.Error("not ready")
	}
}
