package lab

import (
	_ "embed"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

//go:embed manifest/cluster.yaml
var clusterManifest string

//go:embed manifest/workload.yaml
var workloadManifest string

// The names of the lab's images in containerd. Nodes cannot pull them, because no registry has them.
const (
	pauseImage   = "docker.io/kubevpn-lab/pause:1"
	corednsImage = "docker.io/kubevpn-lab/coredns:1"
	EchoImage    = "docker.io/kubevpn-lab/echo:1" // the test server; imagePullPolicy must not be Always
)

// manifest returns everything that is applied to a new cluster.
func (c Config) manifest() string {
	return strings.NewReplacer(
		"COREDNS_IMAGE", corednsImage,
		"ECHO_IMAGE", EchoImage,
		"API_HOST", c.APIServer(c.Families()[0]).String(),
		"API_PORT", strconv.Itoa(APIPort),
		"OUTSIDE_FIRST", c.Families()[0].Outside.String(),
		"DNS_FIRST", c.Families()[0].ClusterDNS.String(),
		"DNS_ALL", joined(c.Families(), func(f Family) quoted { return quoted{f.ClusterDNS} }),
	).Replace(c.nodesManifest() + "---\n" + c.proxyManifest() + clusterManifest + "---\n" + workloadManifest)
}

// proxyManifest returns the ConfigMap with which kubeadm configures kube-proxy. Other programs read the mode from it.
// In the lab, kube-proxy is a program on each node, which does not read it.
func (c Config) proxyManifest() string {
	if c.ProxyMode == ProxyNone {
		return ""
	}
	return fmt.Sprintf(`apiVersion: v1
kind: ConfigMap
metadata: {name: kube-proxy, namespace: kube-system, labels: {app: kube-proxy}}
data:
  config.conf: |
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    bindAddress: 0.0.0.0
    clusterCIDR: %s
    kind: KubeProxyConfiguration
    mode: %s
---
`, joined(c.Families(), func(f Family) netip.Prefix { return f.Pods }), c.ProxyMode)
}

// quoted formats an address for a list in YAML.
type quoted struct{ netip.Addr }

func (q quoted) String() string { return strconv.Quote(q.Addr.String()) }

// nodesManifest returns the Node objects. They exist before kubelet registers, so a node's pod range is known before
// its pod network is configured, and no cloud or IPAM controller has to assign it. kubelet sets the label too, but the
// scheduler needs it to spread pods over nodes that are not ready yet.
func (c Config) nodesManifest() string {
	var documents []string
	for n := 1; n <= c.Nodes; n++ {
		ranges := ""
		for _, f := range c.Families() {
			ranges += fmt.Sprintf("  - %q\n", f.PodRange(n))
		}
		documents = append(documents, fmt.Sprintf(`apiVersion: v1
kind: Node
metadata:
  name: %[1]s
  labels: {kubernetes.io/hostname: %[1]s}
spec:
  podCIDR: %[2]q
  podCIDRs:
%[3]s`, c.NodeName(n), c.Families()[0].PodRange(n), ranges))
	}
	return strings.Join(documents, "---\n")
}
