package connect

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/term"
)

func TestStatusPrintsTables(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	status := api.Status{Connections: []api.Connection{
		{
			ID: "3f2a91c04b7e", Cluster: "lab", Namespace: "shop", Status: api.StatusConnected, Netstack: "gvisor",
			NetstackReason: "ClusterIPs are served by IPVS", ProxyMode: "ipvs", Transport: "port-forward (spdy)", Since: now.Add(-90 * time.Minute), Device: "kubevpn0",
			Addresses: []netip.Addr{netip.MustParseAddr("198.19.0.1")}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			DNS: api.DNSStatus{Mode: api.ResolverResolved}, Services: "resolved by kubevpn",
			ManagerNamespace: "kubevpn", ManagerPod: "m-1", ManagerVersion: "1.2.3",
			AllowInbound: []api.Inbound{{Port: 8080}, {Port: 53, UDP: true}},
			Transports: []api.Transport{
				{Name: "port-forward", State: api.TransportInUse, Seconds: 0.0012, Sent: 1500000, Received: 20},
				{Name: "api-proxy", State: api.TransportFailing, Reason: "you may not create pods/proxy"},
			},
		},
		{ID: "000000000000", Status: api.StatusFailed, Error: api.Errorf(api.ExitLost, "the root helper ended").WithHint("one\ntwo")},
	}}
	tests := []struct{ format, want string }{
		{"table", `ID            CLUSTER  NAMESPACE  STATUS     NETSTACK  TRANSPORT            SINCE
3f2a91c04b7e  lab      shop       connected  gvisor    port-forward (spdy)  90m
000000000000  -        -          failed     -         -                    -

000000000000
  Error: the root helper ended
    one
    two
`},
		{"wide", `ID            CLUSTER  NAMESPACE  STATUS     NETSTACK  TRANSPORT            SINCE  DEVICE    ADDRESSES   NETWORKS    DNS               SERVICES             MANAGER
3f2a91c04b7e  lab      shop       connected  gvisor    port-forward (spdy)  90m    kubevpn0  198.19.0.1  10.0.0.0/8  systemd-resolved  resolved by kubevpn  kubevpn/m-1 (1.2.3)
000000000000  -        -          failed     -         -                    -      -         -           -           -                 -                    -

3f2a91c04b7e
  netstack gvisor: ClusterIPs are served by IPVS
  port-forward in use: round trip 1.2 ms, 1.5 MB sent, 20 B received
  api-proxy failing (you may not create pods/proxy)
  kube-proxy ipvs
  other laptops may connect to 8080, 53/udp

000000000000
  Error: the root helper ended
    one
    two
`},
	}
	for _, tt := range tests {
		t.Run(tt.format, func(t *testing.T) {
			o := &statusOptions{output: term.NewFormat("table", "wide", "json", "yaml")}
			if err := o.output.Set(tt.format); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			if err := o.print(&out, status, now); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
