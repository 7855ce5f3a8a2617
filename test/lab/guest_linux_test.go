package lab

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/testenv"
)

func TestProxySettingsReachTheConfiguration(t *testing.T) {
	c := Config{ProxyMode: ProxyIPVS, ProxySettings: map[string]string{
		"ipvs.strictARP": "true", "ipvs.scheduler": "sh", "conntrack.maxPerCore": "7", "nodePortAddresses": "[primary]",
	}}.withDefaults()
	text, err := c.proxyConfig(2, "/d")
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := yaml.Unmarshal([]byte(text), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "ipvs",
		"hostnameOverride": "lab-node2", "clusterCIDR": "10.244.0.0/16",
		"clientConnection":  map[string]any{"kubeconfig": "/d/pki/kube-proxy.kubeconfig"},
		"ipvs":              map[string]any{"strictARP": true, "scheduler": "sh"},
		"conntrack":         map[string]any{"maxPerCore": 7.0},
		"nodePortAddresses": []any{"primary"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestUnknownSettingsAreReported(t *testing.T) {
	const log = `I1121 04:21:15.788170    1430 options.go:498] "Using lenient decoding as strict decoding failed" err="strict decoding error: unknown field \"ipvs.strictArp\""
I1121 04:21:16.156729    1430 shared_informer.go:349] "Waiting for caches to sync"
`
	if err := unknownSettings(log); err == nil || err.Error() != `kube-proxy's configuration: strict decoding error: unknown field "ipvs.strictArp"` {
		t.Errorf("got %v", err)
	}
	if err := unknownSettings(strings.ReplaceAll(log, "strict decoding failed", "all is well")); err != nil {
		t.Errorf("got %v", err)
	}
}

// TestGuestsLeaveTheControlPlaneItsOwnPlace checks that the control plane has its own place and address if the nodes are guests.
func TestGuestsLeaveTheControlPlaneItsOwnPlace(t *testing.T) {
	for _, test := range []struct {
		guests          bool
		places, server  string
		control, routes string // the control plane's place, and the routes of its host
	}{
		{false, "router laptop node1 node2", "https://10.99.0.1:6443", "node1", "0.0.0.0/0 10.99.0.254 10.244.2.0/24 10.99.0.2"},
		{true, "router laptop control node1 node2", "https://10.99.0.253:6443", "control",
			"0.0.0.0/0 10.99.0.254 10.244.1.0/24 10.99.0.1 10.244.2.0/24 10.99.0.2"},
	} {
		c := Config{ProxyMode: ProxyIPVS, guests: test.guests}.withDefaults()
		number, address := 1, "10.99.0.1/24"
		if test.guests {
			number, address = 0, "10.99.0.253/24"
		}
		network := c.hostNetwork(number)
		var routes []string
		for _, r := range network.Routes {
			routes = append(routes, r.To.String(), r.Via.String())
		}
		got := []string{strings.Join(c.places(), " "), c.Server(), c.control(), strings.Join(routes, " "), network.Addresses[0].String()}
		if diff := cmp.Diff([]string{test.places, test.server, test.control, test.routes, address}, got); diff != "" {
			t.Errorf("guests %v (-want +got):\n%s", test.guests, diff)
		}
		if !slices.Contains(c.apiServerIdentity().addresses, c.APIServer(c.Families()[0])) {
			t.Errorf("guests %v: the API server's certificate is not for its address", test.guests)
		}
		if !strings.Contains(c.manifest(), `{name: KUBERNETES_SERVICE_HOST, value: "`+c.APIServer(c.Families()[0]).String()+`"}`) {
			t.Errorf("guests %v: CoreDNS does not know the API server's address", test.guests)
		}
	}
}

func TestInPlaceUsesTheStandInOfAGuest(t *testing.T) {
	l := New(Config{ProxyMode: ProxyIPVS, NodeModes: []ProxyMode{"", "", ProxyIPTables}, Nodes: 3, guests: true})
	l.programs.Guest = "/cache/guest"
	for _, test := range []struct {
		place, name string
		want        string
	}{
		{"node1", "", "/cache/guest run 169.254.1.2:1 sh -c true"},
		{"node2", "kubelet", "/cache/guest run -alone kubelet 169.254.1.2:1 sh -c true"},
		{"node3", "kubelet", "sh -c true"},
		{"control", "etcd", "sh -c true"},
		{"laptop", "", "sh -c true"},
	} {
		if got := strings.Join(l.inPlace(test.place, test.name, "sh", "-c", "true"), " "); got != test.want {
			t.Errorf("%s: %q, want %q", test.place, got, test.want)
		}
	}
	if got := New(Config{}).inPlace("node1", "", "true"); !slices.Equal(got, []string{"true"}) {
		t.Errorf("without guests: %q", got)
	}
}

func TestNthProcessorWrapsAround(t *testing.T) {
	var set unix.CPUSet
	for _, cpu := range []int{1, 4, 6} {
		set.Set(cpu)
	}
	for n, want := range []int{1, 4, 6, 1, 4} {
		if got := nthProcessor(&set, n); got != want {
			t.Errorf("processor %d is %d, want %d", n, got, want)
		}
	}
}

func TestBuildShimUsesTheCache(t *testing.T) {
	testenv.NeedPrograms(t, "gcc")
	cache := t.TempDir()
	file, err := buildShim(t.Context(), cache)
	if err != nil {
		t.Fatal(err)
	}
	built, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	again, err := buildShim(t.Context(), cache)
	if err != nil || again != file {
		t.Errorf("the second time: %s, %v", again, err)
	}
	if found, err := os.Stat(again); err != nil || !os.SameFile(built, found) {
		t.Errorf("the shim was built again: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(cache, "*")); err != nil || len(left) != 1 {
		t.Errorf("in the cache: %v, %v", left, err)
	}
}
