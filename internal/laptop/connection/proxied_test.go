package connection

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/dns"
)

// linked is a Network that keeps the link. Other methods are not called.
type linked struct {
	Network
	link api.Link
}

func (n *linked) SetLink(_ context.Context, link api.Link) (api.NetworkApplied, error) {
	n.link = link
	return api.NetworkApplied{ResolverMode: api.ResolverProxy}, nil
}

func (n *linked) SetZone(*dns.Zone) error { return nil }

// newProxied returns a connection without a device, whose names are those of lookup.
func newProxied(t *testing.T, network Network, addrs ...netip.Addr) *Connection {
	c := newTestConnection(t)
	c.cfg.Network, c.cfg.Request.Netstack = network, api.NetstackSystem
	c.cfg.Lookup = func(context.Context, string) ([]netip.Addr, error) { return addrs, nil }
	return c
}

func TestProxyGetsTheClustersNetworksWithoutADevice(t *testing.T) {
	n := new(linked)
	c := newProxied(t, n)
	c.view.Update(func(v *view) {
		v.lease = api.Lease{Addrs: addrs("198.19.0.9"), Resolver: netip.MustParseAddr("198.19.0.53"),
			Networks: prefixes("198.19.0.0/16")}
		v.state = api.ManagerState{PodCIDRs: prefixes("10.244.0.0/16"), StatedPodCIDRs: prefixes("10.244.0.0/16"),
			DNSDomain: "cluster.local", DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.10")}}
	})
	if err := c.routes.bringUp(t.Context(), nil); err != nil { // it starts no goroutine
		t.Fatal(err)
	}
	if got := text(n.link.Routes); got != "10.96.0.10/32 10.244.0.0/16" || n.link.Name != "" || n.link.Addrs != nil {
		t.Errorf("link %+v", n.link)
	}
	if s := c.Status(); s.Device != "" || len(s.Addresses) != 0 || text(s.CIDRs) != text(n.link.Routes) {
		t.Errorf("status %+v", s)
	}
	if got := c.cfg.netstack(); got != api.NetstackGVisor {
		t.Errorf("netstack %s", got)
	}
}

func TestProbeOfAProxyUsesNoResolverOfThisMachine(t *testing.T) {
	vip := netip.MustParseAddrPort("10.96.0.1:443")
	c := newProxied(t, nil, vip.Addr())
	var dialed []string
	p := c.prober(func(_ context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		dialed = append(dialed, network+" "+to.String())
		near, far := net.Pipe()
		return near, far.Close()
	})
	if got := p.checkName(t.Context(), "kubernetes.default.svc.cluster.local", []netip.Addr{vip.Addr()}); !got.OK {
		t.Errorf("%+v", got)
	}
	if got := p.checkTCP(t.Context(), "clusterIP", vip); !got.OK || len(dialed) != 1 || dialed[0] != "tcp 10.96.0.1:443" {
		t.Errorf("%+v, dialed %q", got, dialed)
	}
}
