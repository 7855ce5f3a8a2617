package dev

import (
	"context"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
)

func TestProgramHasTheNamesOfItsPod(t *testing.T) {
	ours := netip.MustParseAddr("198.19.0.54")
	two := "2"
	for name, tt := range map[string]struct {
		mode     api.ResolverMode
		machine  dns.ClientConfig
		policy   corev1.DNSPolicy
		config   *corev1.PodDNSConfig
		wantDNS  string
		wantRest string
	}{
		"a redirect of the machine's nameserver": {api.ResolverNFTables,
			dns.ClientConfig{Servers: []string{"192.0.2.1"}, Search: []string{"corp.example"}}, "", nil,
			"[198.19.0.54]", "[shop.svc.cluster.local svc.cluster.local cluster.local] [ndots:5]"},
		"systemd-resolved, with the connection's search list": {api.ResolverResolved,
			dns.ClientConfig{Servers: []string{"127.0.0.53"}, Search: []string{"default.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"}},
			corev1.DNSClusterFirst, nil,
			"[127.0.0.53]", "[shop.svc.cluster.local svc.cluster.local cluster.local] [ndots:5]"},
		"systemd-resolved that cannot be used": {api.ResolverNFTables, dns.ClientConfig{Servers: []string{"127.0.0.53"}}, "", nil,
			"[198.19.0.54]", "[shop.svc.cluster.local svc.cluster.local cluster.local] [ndots:5]"},
		"the pod adds domains and options": {api.ResolverFile, dns.ClientConfig{}, "",
			&corev1.PodDNSConfig{Searches: []string{"x.test"}, Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: &two}, {Name: "edns0"}}},
			"[198.19.0.54]", "[shop.svc.cluster.local svc.cluster.local cluster.local x.test] [ndots:5 ndots:2 edns0]"},
		"the pod has its own alone": {api.ResolverNFTables, dns.ClientConfig{}, corev1.DNSNone, &corev1.PodDNSConfig{Searches: []string{"x.test"}},
			"[198.19.0.54]", "[x.test] []"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{Spec: corev1.PodSpec{DNSPolicy: tt.policy, DNSConfig: tt.config}}
			n := podNames(api.DNSStatus{Mode: tt.mode, Domain: "cluster.local", Programs: ours}, pod, "shop", machineNames(&tt.machine))
			if got := fmt.Sprint(n.DNS); got != tt.wantDNS {
				t.Errorf("nameservers %s, want %s", got, tt.wantDNS)
			}
			if got := fmt.Sprint(n.Search, " ", n.Options); got != tt.wantRest {
				t.Errorf("%s, want %s", got, tt.wantRest)
			}
		})
	}
}

// lastNetwork is a Place that keeps what it was set to.
type lastNetwork struct {
	sandbox.Place
	n sandbox.Network
}

func (p *lastNetwork) SetNetwork(_ context.Context, n sandbox.Network) error {
	p.n = n
	return nil
}

func TestIsolatedProgramHasTheNamesOfItsPod(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		DNSConfig: &corev1.PodDNSConfig{Searches: []string{"x.test"}},
		HostAliases: []corev1.HostAlias{{IP: "10.1.2.3", Hostnames: []string{"db", "db.test\n6.6.6.6 evil"}},
			{IP: "6.6.6.6 evil\n", Hostnames: []string{"evil"}}},
	}}
	place := new(lastNetwork)
	of := sandbox.Network{Search: []string{"shop.svc.cluster.local"}, Options: []string{"ndots:5"}}
	if err := (podPlace{place, pod}).SetNetwork(t.Context(), of); err != nil {
		t.Fatal(err)
	}
	if n := place.n; !slices.Equal(n.Search, []string{"shop.svc.cluster.local", "x.test"}) ||
		!strings.HasPrefix(n.Hosts, "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n") ||
		!strings.HasSuffix(n.Hosts, "\n10.1.2.3\tdb\tdb.test\t6.6.6.6\tevil\n") || strings.Contains(n.Hosts, "\n6.6") {
		t.Errorf("got %+v", n)
	}
	of.Hosts = "10.9.9.9 x\n" // the connection knows the pod's
	if err := (podPlace{place, pod}).SetNetwork(t.Context(), of); err != nil || !reflect.DeepEqual(place.n, of) {
		t.Errorf("got %+v, %v; want %+v", place.n, err, of)
	}
}
