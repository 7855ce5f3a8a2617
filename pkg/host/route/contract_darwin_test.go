package route_test

import (
	"os"
	"testing"

	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/route"
	"kubevpn/pkg/host/route/routetest"
)

func TestRouterKeepsTheContract(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can set routes")
	}
	routetest.TestRouter(t, func(t *testing.T) (routetest.Router, string) {
		f, err := tun.Create("utun", 9000)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() }) // the kernel removes the link with it
		return route.New(), f.Name()
	})
}
