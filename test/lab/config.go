package lab

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
)

// ProxyMode is the mode of kube-proxy on the cluster's nodes.
type ProxyMode string

// The modes. With ProxyNone there is no kube-proxy, and no ClusterIP works inside the cluster, not even that of DNS.
// A node with ProxyIPVS runs on the machine's kernel if that has ip_vs. Otherwise it runs in a guest, a user-mode Linux
// kernel (see package guest), and the control plane has its own place, "control".
const (
	ProxyIPTables ProxyMode = "iptables"
	ProxyNFTables ProxyMode = "nftables"
	ProxyIPVS     ProxyMode = "ipvs"
	ProxyNone     ProxyMode = "none"
)

// DefaultName is the name of a lab without a configured name.
const DefaultName = "lab"

// Config configures a lab.
type Config struct {
	Name      string    // default DefaultName; lower-case letters, digits and dashes, at most 16
	Nodes     int       // default 2
	ProxyMode ProxyMode // default ProxyIPTables
	// NodeModes are the modes of nodes 1, 2, ... that differ from ProxyMode, as during a migration; "": ProxyMode. The
	// ConfigMap of kube-proxy has ProxyMode.
	NodeModes []ProxyMode
	// Kubernetes is an older minor version for which test/lab/cluster/kube has a module file, as in "1.31"; default
	// $KUBEVPN_LAB_KUBERNETES, or else the newest.
	Kubernetes string
	IPv6       bool // dual-stack, IPv4 first
	// Ranges selects one of two sets of address ranges, 1 (default) or 2. Labs that are joined need different sets.
	Ranges int

	// ProxySettings maps the paths of fields of KubeProxyConfiguration to their values in YAML:
	// "ipvs.strictARP": "true".
	ProxySettings map[string]string

	Dir      string    // of all labs' state; default $KUBEVPN_LAB_DIR or /var/lib/kubevpn-lab
	Cache    string    // of built programs; default $KUBEVPN_CACHE, $XDG_CACHE_HOME or ~/.cache
	Source   string    // the repository; default: found above the working directory or the program
	Progress io.Writer // receives a line for each step; default: none

	guests bool // nodes with ProxyIPVS are guests; set by Up, see hostHasIPVS
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = DefaultName
	}
	if c.Nodes == 0 {
		c.Nodes = 2
	}
	if c.Ranges == 0 {
		c.Ranges = 1
	}
	if c.ProxyMode == "" {
		c.ProxyMode = ProxyIPTables
	}
	if c.Kubernetes == "" {
		c.Kubernetes = os.Getenv("KUBEVPN_LAB_KUBERNETES")
	}
	if c.Dir == "" {
		c.Dir = defaultDir()
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	return c
}

func defaultDir() string {
	if dir := os.Getenv("KUBEVPN_LAB_DIR"); dir != "" {
		return dir
	}
	return "/var/lib/kubevpn-lab"
}

func (c Config) validate() error {
	var errs []error
	if !regexp.MustCompile(`^[a-z]([a-z0-9-]{0,14}[a-z0-9])?$`).MatchString(c.Name) {
		errs = append(errs, fmt.Errorf("name %q: want lower-case letters, digits and dashes, at most 16, "+
			"a letter first", c.Name))
	}
	if c.Nodes < 1 || c.Nodes > MaxNodes {
		errs = append(errs, fmt.Errorf("%d nodes: want 1 to %d", c.Nodes, MaxNodes))
	}
	if c.Ranges != 1 && c.Ranges != 2 {
		errs = append(errs, fmt.Errorf("ranges %d: want 1 or 2", c.Ranges))
	}
	switch c.ProxyMode {
	case ProxyIPTables, ProxyNFTables, ProxyIPVS, ProxyNone:
	default:
		errs = append(errs, fmt.Errorf("proxy mode %q: want iptables, nftables, ipvs or none", c.ProxyMode))
	}
	if len(c.NodeModes) > c.Nodes {
		errs = append(errs, fmt.Errorf("proxy modes of %d nodes: the lab has %d", len(c.NodeModes), c.Nodes))
	}
	for _, m := range c.NodeModes {
		if !slices.Contains([]ProxyMode{"", ProxyIPTables, ProxyNFTables, ProxyIPVS}, m) || c.ProxyMode == ProxyNone {
			errs = append(errs, fmt.Errorf("proxy mode %q of a node: want iptables, nftables or ipvs, of nodes with "+
				"a kube-proxy", m))
		}
	}
	if c.Kubernetes != "" && !regexp.MustCompile(`^1\.\d+$`).MatchString(c.Kubernetes) {
		errs = append(errs, fmt.Errorf("Kubernetes %q: want a minor version, as in 1.31", c.Kubernetes))
	}
	if c.ProxyMode == ProxyNone && len(c.ProxySettings) > 0 {
		errs = append(errs, errors.New("kube-proxy settings need a proxy mode other than none"))
	} else if _, err := c.proxyConfig(1, ""); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// shape describes the lab for users: "2 nodes, kube-proxy iptables, IPv4 and IPv6".
func (c Config) shape() string {
	s := fmt.Sprintf("%d nodes", c.Nodes)
	if c.Nodes == 1 {
		s = "1 node"
	}
	if c.ProxyMode == ProxyNone {
		s += ", no kube-proxy"
	} else {
		s += ", kube-proxy " + string(c.ProxyMode)
	}
	for n := range c.NodeModes {
		s += fmt.Sprintf(", %s on node%d", c.proxyMode(n+1), n+1)
	}
	for _, path := range slices.Sorted(maps.Keys(c.ProxySettings)) {
		s += fmt.Sprintf(" %s=%s", path, c.ProxySettings[path])
	}
	s += ", IPv4"
	if c.IPv6 {
		s += " and IPv6"
	}
	if c.Kubernetes != "" {
		s += ", Kubernetes " + c.Kubernetes
	}
	if c.Ranges == 2 {
		s += ", second ranges"
	}
	return s
}

// NodeName returns the Kubernetes name and the host name of node n, counted from 1.
func (c Config) NodeName(n int) string { return fmt.Sprintf("%s-node%d", c.Name, n) }

// proxyMode returns the mode of kube-proxy on node n, counted from 1.
func (c Config) proxyMode(n int) ProxyMode {
	if n <= len(c.NodeModes) && c.NodeModes[n-1] != "" {
		return c.NodeModes[n-1]
	}
	return c.ProxyMode
}

// usesIPVS reports whether kube-proxy is in IPVS mode on a node.
func (c Config) usesIPVS() bool {
	return c.ProxyMode == ProxyIPVS || slices.Contains(c.NodeModes, ProxyIPVS)
}

// guest reports whether node n runs in a guest.
func (c Config) guest(n int) bool { return c.guests && c.proxyMode(n) == ProxyIPVS }

// namespace returns the network namespace of a place: laptop, router, node1, ...
func (c Config) namespace(place string) string { return c.Name + "-" + place }

// places returns the lab's network namespaces without the lab's name.
func (c Config) places() []string {
	places := []string{"router", "laptop"}
	if c.guests {
		places = append(places, controlPlace)
	}
	for n := 1; n <= c.Nodes; n++ {
		places = append(places, fmt.Sprintf("node%d", n))
	}
	return places
}

// controlPlace is the place of the control plane if there are guests.
const controlPlace = "control"

// control returns the place of the control plane: node 1, unless there are guests.
func (c Config) control() string {
	if c.guests {
		return controlPlace
	}
	return "node1"
}

// APIServer returns the API server's address in a family.
func (c Config) APIServer(f Family) netip.Addr {
	if c.guests {
		return f.Control
	}
	return f.Node(1)
}

// Server returns the API server's URL.
func (c Config) Server() string {
	return "https://" + netip.AddrPortFrom(c.APIServer(c.Families()[0]), APIPort).String()
}

// kubeconfig returns a self-contained kubeconfig for one client.
func (c Config) kubeconfig(user string, ca []byte, pair keyPair) []byte {
	credential := fmt.Sprintf("client-certificate-data: %s\n    client-key-data: %s",
		base64.StdEncoding.EncodeToString(pair.certificate), base64.StdEncoding.EncodeToString(pair.key))
	return c.kubeconfigWith(user, ca, credential)
}

func (c Config) kubeconfigWith(user string, ca []byte, credential string) []byte {
	return []byte(strings.NewReplacer(
		"NAME", c.Name, "SERVER", c.Server(), "USER", user, "CREDENTIAL", credential,
		"AUTHORITY", base64.StdEncoding.EncodeToString(ca),
	).Replace(`apiVersion: v1
kind: Config
clusters:
- name: NAME
  cluster:
    server: SERVER
    certificate-authority-data: AUTHORITY
users:
- name: USER
  user:
    CREDENTIAL
contexts:
- name: NAME
  context:
    cluster: NAME
    user: USER
    namespace: default
current-context: NAME
`))
}
