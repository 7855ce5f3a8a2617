package watch

import (
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
)

func TestZoneComesFromNodeOrEndpoint(t *testing.T) {
	t.Run("from-the-node", func(t *testing.T) {
		c := newCluster("n1")
		c.setNode(balancer.Name{Name: "n2"}, convertNode(managertest.Node("n2", "10.244.1.0/24", "192.168.0.2", "z2")))
		c.setNode(balancer.Name{Name: "n1"}, convertNode(managertest.Node("n1", "10.244.0.0/24", "192.168.0.1", "z1")))
		if c.zone != "z1" {
			t.Errorf("zone %q", c.zone)
		}
	})
	t.Run("from-an-endpoint-here", func(t *testing.T) {
		c := newCluster("n1") // it may not watch nodes
		c.setSlice(balancer.Name{Namespace: "default", Name: "a"}, convertSlice(managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].NodeName, s.Endpoints[0].Zone = managertest.Pointer("n2"), managertest.Pointer("z2")
			s.Endpoints[1].Zone = managertest.Pointer("z3")
		}, "10.244.0.1", "10.244.0.2")))
		if c.zone != "z3" {
			t.Errorf("zone %q", c.zone)
		}
	})
}
