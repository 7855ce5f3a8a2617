package lab

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// containerdConfig returns containerd's configuration, in version 2, which containerd 1.6 to 2 read. The paths are the
// defaults, in the node's own directories, so that ctr finds it without flags. registries is the directory of
// registryConfig.
func containerdConfig(cniDir, snapshotter, registries string) string {
	return fmt.Sprintf(`version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "/run/containerd/containerd.sock"

# What it would make on the machine itself.
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  # Lowering a score takes a capability that a sandboxed machine may not have.
  restrict_oom_score_adj = true
  # A profile would stay in the machine's kernel.
  disable_apparmor = true

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = %q

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = %q
  conf_dir = "/var/lib/lab-cni"

[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = %q
`, pauseImage, snapshotter, cniDir, registries)
}

// registryConfig returns the hosts.toml that tells containerd to use the registry of Config.Registry without TLS.
// containerd reads the file for each pull, from a directory with the registry's name. containerd 1.6 ignores a file
// without hosts.
func (c Config) registryConfig() string {
	url := "http://" + c.Registry().String()
	return fmt.Sprintf("server = %[1]q\n\n[host.%[1]q]\n  capabilities = [\"pull\", \"resolve\"]\n", url)
}

// cniConfig returns a node's pod network: a routed veth pair per pod. Unlike a bridge, it needs no br_netfilter:
// packets of a pod always pass the node's IP layer, where kube-proxy's rules are, also to a pod of the same node and to
// the pod itself (hairpin).
func (c Config) cniConfig(n int) string {
	type object = map[string]any
	var ranges, routes []any
	for _, f := range c.Families() {
		ranges = append(ranges, []any{object{"subnet": f.PodRange(n).String()}})
		routes = append(routes, object{"dst": netip.PrefixFrom(unspecified(f.Router), 0).String()})
	}
	b, err := json.MarshalIndent(object{
		"cniVersion": "0.4.0",
		"name":       "lab",
		"plugins": []any{
			object{
				"type":   "ptp",
				"ipMasq": false, // see Config.masquerade: between nodes a pod keeps its address
				"ipam":   object{"type": "host-local", "ranges": ranges, "routes": routes},
			},
			object{"type": "portmap", "capabilities": object{"portMappings": true}},
		},
	}, "", "  ")
	if err != nil {
		panic(err) // maps of strings and booleans
	}
	return string(b) + "\n"
}

// kubeletConfig returns the KubeletConfiguration of a node.
func (c Config) kubeletConfig(n int, dir string) string {
	pki := filepath.Join(dir, "pki")
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: %[1]s/ca.crt}
authorization: {mode: Webhook}
tlsCertFile: %[1]s/node%[2]d.crt
tlsPrivateKeyFile: %[1]s/node%[2]d.key
address: %[3]s
healthzBindAddress: 127.0.0.1
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: [%[4]s]
clusterDomain: %[5]s
resolvConf: %[6]s/node%[2]d/resolv.conf
cgroupDriver: cgroupfs
cgroupRoot: /kubevpn-lab-%[7]s/node%[2]d
cgroupsPerQOS: true
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
localStorageCapacityIsolation: false
serializeImagePulls: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: 1%%, imagefs.available: 1%%, nodefs.inodesFree: 1%%}
nodeStatusUpdateFrequency: 5s
shutdownGracePeriod: 0s
`, pki, n, c.kubeletAddress(n), c.Families()[0].ClusterDNS, ClusterDomain, dir, c.Name)
}

// kubeletAddress returns the address on which kubelet listens: the node's address, or all addresses.
func (c Config) kubeletAddress(n int) string {
	if c.IPv6 {
		return `"::"`
	}
	return c.Families()[0].Node(n).String()
}

// proxyConfig returns the KubeProxyConfiguration of a node.
func (c Config) proxyConfig(n int, dir string) (string, error) {
	text := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: %s
clusterCIDR: %s
clientConnection: {kubeconfig: %s/pki/kube-proxy.kubeconfig}
# The sizes of the connection table are the machine's, not the namespace's.
conntrack: {maxPerCore: 0}
`, c.proxyMode(n), c.NodeName(n), joined(c.Families(), func(f Family) netip.Prefix { return f.Pods }), dir)
	if len(c.ProxySettings) == 0 {
		return text, nil
	}
	fields := map[string]any{}
	if err := yaml.Unmarshal([]byte(text), &fields); err != nil {
		return "", fmt.Errorf("reading kube-proxy's configuration: %w", err)
	}
	for path, text := range c.ProxySettings {
		var value any
		if err := yaml.Unmarshal([]byte(text), &value); err != nil {
			return "", fmt.Errorf("kube-proxy's setting %s=%s: %w", path, text, err)
		}
		if err := setField(fields, strings.Split(path, "."), value); err != nil {
			return "", fmt.Errorf("kube-proxy's setting %s=%s: %w", path, text, err)
		}
	}
	b, err := yaml.Marshal(fields)
	return string(b), err
}

// setField sets a field in a tree of objects and creates missing objects.
func setField(fields map[string]any, path []string, value any) error {
	for _, name := range path[:len(path)-1] {
		if fields[name] == nil {
			fields[name] = map[string]any{}
		}
		inner, ok := fields[name].(map[string]any)
		if !ok {
			return fmt.Errorf("%s has no fields", name)
		}
		fields = inner
	}
	fields[path[len(path)-1]] = value
	return nil
}

// ClusterDomain is the DNS domain of every lab's cluster.
const ClusterDomain = "cluster.local"

func unspecified(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// nodeResolv returns the resolv.conf of a node: the router resolves outside names.
func (c Config) nodeResolv() string {
	var b strings.Builder
	for _, f := range c.Families() {
		fmt.Fprintf(&b, "nameserver %s\n", f.Router)
	}
	return b.String()
}
