package lab

import (
	"crypto/x509"
	"encoding/pem"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

func TestAddressesAreInTheirNetworks(t *testing.T) {
	for _, test := range []struct {
		family                 Family
		node, pods, dns, cross string
	}{
		{ipv4(1), "10.99.0.2", "10.244.2.0/24", "10.96.0.10", "10.98.0.2"},
		{ipv6(1), "fd00:10:99::2", "fd00:10:244:2::/64", "fd00:10:96::a", "fd00:10:98::2"},
		{ipv4(2), "10.199.0.2", "10.144.2.0/24", "10.196.0.10", "10.198.0.2"},
		{ipv6(2), "fd00:10:199::2", "fd00:10:144:2::/64", "fd00:10:196::a", "fd00:10:198::2"},
	} {
		f := test.family
		got := []string{f.Node(2).String(), f.PodRange(2).String(), f.ClusterDNS.String(), f.Laptop.String()}
		if diff := cmp.Diff([]string{test.node, test.pods, test.dns, test.cross}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if !f.Pods.Contains(f.PodRange(MaxNodes).Addr()) || !f.NodeNet.Contains(f.Node(MaxNodes)) || !f.NodeNet.Contains(f.Router) {
			t.Errorf("%v: addresses outside of their networks", f)
		}
	}
}

// TestRangesAreDisjoint checks that labs with different ranges can be joined.
func TestRangesAreDisjoint(t *testing.T) {
	var all []netip.Prefix
	for _, f := range []Family{ipv4(1), ipv4(2), ipv6(1), ipv6(2)} {
		all = append(all, f.NodeNet, f.LaptopNet, f.Pods, f.Services, netip.PrefixFrom(f.Outside, f.Outside.BitLen()))
	}
	for i, p := range all {
		for _, q := range all[:i] {
			if p.Overlaps(q) {
				t.Errorf("%v overlaps %v", p, q)
			}
		}
	}
}

func TestValidateRejectsWrongConfigurations(t *testing.T) {
	for _, test := range []struct {
		config Config
		want   string
	}{
		{Config{}, ""},
		{Config{Name: "lt-1234567", Nodes: 9, ProxyMode: ProxyNone, Ranges: 2}, ""},
		{Config{Name: "Lab"}, `name "Lab"`},
		{Config{Name: "-lab"}, `name "-lab"`},
		{Config{Name: "../lab"}, `name "../lab"`},
		{Config{Name: "a-name-that-is-too-long"}, "at most 16"},
		{Config{Nodes: 10}, "10 nodes: want 1 to 9"},
		{Config{Nodes: -1}, "-1 nodes"},
		{Config{ProxyMode: "userspace"}, `proxy mode "userspace": want iptables, nftables, ipvs or none`},
		{Config{Ranges: 3}, "ranges 3"},
		{Config{Kubernetes: "1.31", NodeModes: []ProxyMode{ProxyIPVS, ""}}, ""},
		{Config{Kubernetes: "v1.31.0"}, `Kubernetes "v1.31.0"`},
		{Config{Nodes: 1, NodeModes: []ProxyMode{ProxyIPVS, ""}}, "proxy modes of 2 nodes"},
		{Config{NodeModes: []ProxyMode{ProxyNone}}, `proxy mode "none" of a node`},
		{Config{ProxyMode: ProxyIPVS, ProxySettings: map[string]string{"ipvs.strictARP": "true"}}, ""},
		{Config{ProxyMode: ProxyNone, ProxySettings: map[string]string{"ipvs.strictARP": "true"}}, "kube-proxy settings need a proxy mode other than none"},
		{Config{ProxySettings: map[string]string{"mode.fast": "true"}}, "kube-proxy's setting mode.fast=true: mode has no fields"},
		{Config{ProxySettings: map[string]string{"ipvs.scheduler": "{"}}, "kube-proxy's setting ipvs.scheduler={: "},
	} {
		err := test.config.withDefaults().validate()
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%+v: got %v, want %q", test.config, err, test.want)
		}
	}
}

func TestShapeDescribesTheLab(t *testing.T) {
	for _, test := range []struct {
		config Config
		want   string
	}{
		{Config{}, "2 nodes, kube-proxy iptables, IPv4"},
		{Config{Nodes: 1, ProxyMode: ProxyNone, IPv6: true}, "1 node, no kube-proxy, IPv4 and IPv6"},
		{Config{Nodes: 3, ProxyMode: ProxyNFTables, Ranges: 2}, "3 nodes, kube-proxy nftables, IPv4, second ranges"},
		{Config{ProxyMode: ProxyIPVS, ProxySettings: map[string]string{"ipvs.scheduler": "sh", "iptables.masqueradeAll": "true"}},
			"2 nodes, kube-proxy ipvs iptables.masqueradeAll=true ipvs.scheduler=sh, IPv4"},
	} {
		if got := test.config.withDefaults().shape(); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
}

func TestPKIIsComplete(t *testing.T) {
	dir := t.TempDir()
	c := Config{Name: "x", IPv6: true}.withDefaults()
	if err := c.writePKI(dir); err != nil {
		t.Fatal(err)
	}
	read := func(name string) *x509.Certificate {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(b)
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		return certificate
	}
	roots := x509.NewCertPool()
	roots.AddCert(read("ca.crt"))
	serials := map[string]string{}
	for _, test := range []struct {
		file, name string
		groups     []string
		hosts      []string // names and addresses that clients use for the server
	}{
		{"apiserver.crt", "kube-apiserver", nil, []string{"10.99.0.1", "fd00:10:99::1", "10.96.0.1", "fd00:10:96::1", "127.0.0.1", "kubernetes.default.svc"}},
		{"node2.crt", "system:node:x-node2", []string{"system:nodes"}, []string{"10.99.0.2", "fd00:10:99::2", "x-node2"}},
		{"kubelet-client.crt", "kube-apiserver-kubelet-client", []string{"system:masters"}, nil},
		{"admin.crt", "admin", []string{"system:masters"}, nil},
		{"dev.crt", "dev", []string{"developers"}, nil},
		{"kube-scheduler.crt", "system:kube-scheduler", nil, nil},
	} {
		certificate := read(test.file)
		if certificate.Subject.CommonName != test.name || !cmp.Equal(certificate.Subject.Organization, test.groups) {
			t.Errorf("the subject of %s is %v", test.file, certificate.Subject)
		}
		_, err := certificate.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		if err != nil {
			t.Errorf("%s: %v", test.file, err)
		}
		for _, host := range test.hosts {
			if err := certificate.VerifyHostname(host); err != nil {
				t.Errorf("%s: %v", test.file, err)
			}
		}
		if other, used := serials[certificate.SerialNumber.String()]; used {
			t.Errorf("%s and %s have the same serial number", test.file, other)
		}
		serials[certificate.SerialNumber.String()] = test.file
	}
	if _, err := os.Stat(filepath.Join(dir, "node3.crt")); err == nil {
		t.Error("a third node has a certificate in a lab of two")
	}
	info, err := os.Stat(filepath.Join(dir, "admin.kubeconfig"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("admin.kubeconfig: %v, %v", info.Mode(), err)
	}
}

func TestKubeconfigIsSelfContained(t *testing.T) {
	c := Config{Name: "x", Ranges: 2}.withDefaults()
	got := string(c.kubeconfig(Developer, []byte("CA"), keyPair{[]byte("CERT"), []byte("KEY")}))
	want := `apiVersion: v1
kind: Config
clusters:
- name: x
  cluster:
    server: https://10.199.0.1:6443
    certificate-authority-data: Q0E=
users:
- name: dev
  user:
    client-certificate-data: Q0VSVA==
    client-key-data: S0VZ
contexts:
- name: x
  context:
    cluster: x
    user: dev
    namespace: default
current-context: x
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if bearer := string(c.bearer([]byte("CA"), "TOKEN")); !strings.Contains(bearer, "- name: token\n  user:\n    token: TOKEN\n") {
		t.Errorf("bearer:\n%s", bearer)
	}
}

func TestCNIConfigRoutesPods(t *testing.T) {
	want := `{
  "cniVersion": "0.4.0",
  "name": "lab",
  "plugins": [
    {
      "ipMasq": false,
      "ipam": {
        "ranges": [
          [
            {
              "subnet": "10.244.2.0/24"
            }
          ],
          [
            {
              "subnet": "fd00:10:244:2::/64"
            }
          ]
        ],
        "routes": [
          {
            "dst": "0.0.0.0/0"
          },
          {
            "dst": "::/0"
          }
        ],
        "type": "host-local"
      },
      "type": "ptp"
    },
    {
      "capabilities": {
        "portMappings": true
      },
      "type": "portmap"
    }
  ]
}
`
	if diff := cmp.Diff(want, Config{IPv6: true}.withDefaults().cniConfig(2)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMasqueradeCoversPodsOnly(t *testing.T) {
	want := `table ip lab {
	chain postrouting {
		type nat hook postrouting priority 100; policy accept;
		oifname "eth0" ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade
	}
}
`
	if diff := cmp.Diff(want, Config{}.withDefaults().masquerade()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestConfigurationsAreYAML parses the configurations, because Kubernetes reports invalid YAML late and only in a log.
func TestConfigurationsAreYAML(t *testing.T) {
	for _, c := range []Config{{}, {IPv6: true, ProxyMode: ProxyNFTables, Ranges: 2}} {
		c = c.withDefaults()
		proxy, err := c.proxyConfig(1, "/d")
		if err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"kubelet": c.kubeletConfig(1, "/d"), "kube-proxy": proxy} {
			var parsed struct {
				APIVersion, Kind, Address, CgroupRoot, Mode, ClusterCIDR, HostnameOverride string
				ClusterDNS                                                                 []string
			}
			if err := yaml.Unmarshal([]byte(text), &parsed); err != nil {
				t.Errorf("%s: %v\n%s", name, err, text)
			}
			got := []string{parsed.Address, parsed.CgroupRoot, parsed.Mode, parsed.ClusterCIDR, parsed.HostnameOverride}
			want := map[string][]string{
				"kubelet1":    {"10.99.0.1", "/kubevpn-lab-lab/node1", "", "", ""},
				"kubelet2":    {"::", "/kubevpn-lab-lab/node1", "", "", ""},
				"kube-proxy1": {"", "", "iptables", "10.244.0.0/16", "lab-node1"},
				"kube-proxy2": {"", "", "nftables", "10.144.0.0/16,fd00:10:144::/48", "lab-node1"},
			}[name+map[int]string{1: "1", 2: "2"}[c.Ranges]]
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
		}
	}
}

func TestManifestHasNoPlaceholders(t *testing.T) {
	c := Config{IPv6: true}.withDefaults()
	manifest := c.manifest()
	for _, placeholder := range []string{"_IMAGE", "API_", "DNS_"} {
		if strings.Contains(manifest, placeholder) {
			t.Errorf("%s is left in the manifest", placeholder)
		}
	}
	var paths []string
	for document := range strings.SplitSeq(manifest, "\n---\n") {
		path, err := objectPath(document)
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		paths = append(paths, path)
	}
	want := []string{
		"/api/v1/nodes/lab-node1",
		"/api/v1/nodes/lab-node2",
		"/api/v1/namespaces/kube-system/configmaps/kube-proxy",
		"/api/v1/namespaces/kube-system/serviceaccounts/coredns",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/system:coredns",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/system:coredns",
		"/api/v1/namespaces/kube-system/configmaps/coredns",
		"/apis/apps/v1/namespaces/kube-system/deployments/coredns",
		"/api/v1/namespaces/kube-system/services/kube-dns",
		"/api/v1/namespaces/default/serviceaccounts/developer",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings/dev-edit",
		"/apis/apps/v1/namespaces/default/deployments/web",
		"/api/v1/namespaces/default/services/web",
		"/api/v1/namespaces/default/services/web-headless",
	}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, text := range []string{`clusterIPs: ["10.96.0.10","fd00:10:96::a"]`, "  podCIDR: \"10.244.2.0/24\"\n  podCIDRs:\n  - \"10.244.2.0/24\"\n  - \"fd00:10:244:2::/64\"\n"} {
		if !strings.Contains(manifest, text) {
			t.Errorf("the manifest lacks %q", text)
		}
	}
	// Only the manifest of a kube-proxy names a mode.
	for mode, want := range map[ProxyMode]string{ProxyNFTables: "\n    mode: nftables\n", ProxyNone: ""} {
		text := Config{ProxyMode: mode}.withDefaults().proxyManifest()
		if want == "" && text != "" || !strings.Contains(text, want) {
			t.Errorf("proxy mode %s: the manifest is %q", mode, text)
		}
	}
}
