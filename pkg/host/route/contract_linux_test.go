package route_test

import (
	"testing"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/route"
	"kubevpn/pkg/host/route/routetest"
)

func TestRouterKeepsTheContract(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	routetest.TestRouter(t, func(t *testing.T) (routetest.Router, string) {
		f, err := tun.Create("kubevpn0", 9000)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() }) // the kernel removes the link with it
		return route.New(), f.Name()
	})
}
