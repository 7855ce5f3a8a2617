package watch

import (
	"hash/maphash"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
)

func TestConversionFollowsKubeProxy(t *testing.T) {
	two := []*discoveryv1.EndpointSlice{managertest.WebSlice("a", nil, "10.244.0.1")}
	tests := []struct {
		name     string
		service  *corev1.Service
		slices   []*discoveryv1.EndpointSlice
		protocol balancer.Protocol
		dst      string
		want     []string // all candidates, or the verdict
	}{
		{"named-target-port", managertest.WebService(nil), two, balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"udp", managertest.WebService(nil), two, balancer.UDP, "10.96.0.10:53", []string{"10.244.0.1:5353"}},
		{"unknown-port", managertest.WebService(nil), two, balancer.TCP, "10.96.0.10:81", []string{"refused"}},
		{"several-slices", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", nil, "10.244.0.1"), managertest.WebSlice("b", nil, "10.244.0.2", "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080", "10.244.0.2:8080"}},
		{"slices-with-other-target-ports", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", nil, "10.244.0.1"),
			managertest.WebSlice("b", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Port = managertest.Pointer(int32(9090)) }, "10.244.0.2")},
			balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080", "10.244.0.2:9090"}},
		{"port-without-name", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name = nil }, "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"refused"}},
		{"port-without-number", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Port = nil }, "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"refused"}},
		{"single-unnamed-port", managertest.WebService(func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[:1]; s.Spec.Ports[0].Name = "" }),
			[]*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name = managertest.Pointer("") }, "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"conditions-default-to-ready", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[1].Conditions = discoveryv1.EndpointConditions{Ready: managertest.Pointer(false), Serving: managertest.Pointer(false)}
		}, "10.244.0.1", "10.244.0.2")}, balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"terminating", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: managertest.Pointer(false), Serving: managertest.Pointer(true), Terminating: managertest.Pointer(true)}
		}, "10.244.0.1")}, balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"local-elsewhere", managertest.WebService(func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy = managertest.Pointer(corev1.ServiceInternalTrafficPolicyLocal)
		}),
			[]*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].NodeName = managertest.Pointer("n2") }, "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"dropped"}},
		{"zone-hints", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z2"}}}
			s.Endpoints[1].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1"}}}
		}, "10.244.0.1", "10.244.0.2")}, balancer.TCP, "10.96.0.10:80", []string{"10.244.0.2:8080"}},
		{"node-hints", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: "n1"}}}
			s.Endpoints[1].Hints = &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: "n2"}}}
		}, "10.244.0.1", "10.244.0.2")}, balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"dual-stack", managertest.WebService(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.96.0.10", "fd00:96::10"} }),
			[]*discoveryv1.EndpointSlice{managertest.WebSlice("a", nil, "10.244.0.1"),
				managertest.WebSlice("b", func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressTypeIPv6 }, "fd00:244::1")},
			balancer.TCP, "[fd00:96::10]:80", []string{"[fd00:244::1]:8080"}},
		{"address-of-another-type-than-its-slice", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", nil, "fd00:244::1", "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"fqdn-slice", managertest.WebService(nil), []*discoveryv1.EndpointSlice{managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressTypeFQDN }, "10.244.0.1")},
			balancer.TCP, "10.96.0.10:80", []string{"refused"}},
		{"headless", managertest.WebService(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }), two,
			balancer.TCP, "10.96.0.10:80", []string{"not a service"}},
		{"external-name", managertest.WebService(func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.com"
		}), two,
			balancer.TCP, "10.96.0.10:80", []string{"not a service"}},
		{"another-proxy-serves-it", managertest.WebService(func(s *corev1.Service) { s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "x"} }), two,
			balancer.TCP, "10.96.0.10:80", []string{"not a service"}},
		{"external-ip-is-not-trusted", managertest.WebService(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"1.1.1.1"} }), two,
			balancer.TCP, "1.1.1.1:80", []string{"not a service"}},
		{"load-balancer-ip-is-not-trusted", managertest.WebService(func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "1.1.1.1"}}
		}), two, balancer.TCP, "1.1.1.1:80", []string{"not a service"}},
		{"only-cluster-ip-set", managertest.WebService(func(s *corev1.Service) { s.Spec.ClusterIPs = nil }), two, balancer.TCP, "10.96.0.10:80", []string{"10.244.0.1:8080"}},
		{"without-slices", managertest.WebService(nil), nil, balancer.TCP, "10.96.0.10:80", []string{"refused"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			of := make(map[string]*endpointSlice)
			for _, s := range tt.slices {
				of[s.Name] = convertSlice(s)
			}
			b := balancer.New("n1")
			b.SetZone("z1")
			b.Apply([]balancer.Service{join(balancer.Name{Namespace: "default", Name: "web"}, convertService(tt.service), of)}, nil)
			p, verdict := b.Pick(tt.protocol, netip.MustParseAddrPort(tt.dst), "laptop", balancer.RoundRobin)
			got := []string{verdict.String()}
			if verdict == balancer.Chosen {
				got = nil
				for ok := true; ok; ok = p.Next() {
					got = append(got, p.Endpoint().String())
				}
				slices.Sort(got)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestConversionKeepsAffinity(t *testing.T) {
	tests := []struct {
		name   string
		config *corev1.SessionAffinityConfig
		kind   corev1.ServiceAffinity
		want   time.Duration
	}{
		{"none", nil, corev1.ServiceAffinityNone, 0},
		{"default", nil, corev1.ServiceAffinityClientIP, 3 * time.Hour},
		{"set", &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: managertest.Pointer(int32(60))}}, corev1.ServiceAffinityClientIP, time.Minute},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := managertest.WebService(func(s *corev1.Service) { s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = tt.kind, tt.config })
			if got := convertService(s).affinity; got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestClusterIgnoresSliceWithoutService(t *testing.T) {
	c := newCluster("n1")
	s := managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Labels = nil }, "10.244.0.1")
	c.setSlice(balancer.Name{Namespace: "default", Name: "a"}, convertSlice(s))
	if len(c.slices) != 0 || len(c.owner) != 0 {
		t.Errorf("the cluster kept a slice without a Service: %v", c.slices)
	}
}

func TestSliceMovesToAnotherService(t *testing.T) {
	c := newCluster("n1")
	name := balancer.Name{Namespace: "default", Name: "a"}
	c.setSlice(name, convertSlice(managertest.WebSlice("a", nil, "10.244.0.1")))
	c.setSlice(name, convertSlice(managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "api" }, "10.244.0.1")))
	if c.slices[balancer.Name{Namespace: "default", Name: "web"}] != nil || c.slices[balancer.Name{Namespace: "default", Name: "api"}] == nil {
		t.Errorf("the slice belongs to %v", c.slices)
	}
	c.setSlice(name, nil)
	if len(c.slices)+len(c.owner)+len(c.networks.pods) != 0 {
		t.Errorf("the cluster kept parts of a deleted slice: %v %v %v", c.slices, c.owner, c.networks.pods)
	}
}

func TestHashRecordsFollowsDNS(t *testing.T) {
	seed := maphash.MakeSeed()
	hash := func(change func(*corev1.Service), slices ...*discoveryv1.EndpointSlice) uint64 {
		of := map[string]*endpointSlice{}
		for _, s := range slices {
			of[s.Name] = convertSlice(s)
		}
		return hashRecords(seed, convertService(managertest.WebService(change)), of)
	}
	headless := func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }
	external := func(name string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, name }
	}
	one, two := managertest.WebSlice("a", nil, "10.244.0.1"), managertest.WebSlice("b", nil, "10.244.0.2")
	unready := managertest.WebSlice("a", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Conditions.Ready = managertest.Pointer(false) }, "10.244.0.1")
	for name, tt := range map[string]struct {
		before, after uint64
		same          bool
	}{
		"label":                       {hash(nil), hash(func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} }), true},
		"endpoint behind a ClusterIP": {hash(nil, one), hash(nil, one, two), true},
		"ClusterIP":                   {hash(nil), hash(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.96.9.9"} }), false},
		"port":                        {hash(nil), hash(func(s *corev1.Service) { s.Spec.Ports[0].Port++ }), false},
		"external name":               {hash(external("a.example")), hash(external("b.example")), false},
		"headless":                    {hash(nil), hash(headless), false},
		"endpoint of a headless one":  {hash(headless, one), hash(headless, one, two), false},
		"its readiness":               {hash(headless, one), hash(headless, unready), false},
		"the order of its slices":     {hash(headless, one, two), hash(headless, two, one), true},
	} {
		if (tt.before == tt.after) != tt.same {
			t.Errorf("%s: the hash was %x and is %x", name, tt.before, tt.after)
		}
	}
}
