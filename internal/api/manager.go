package api

import "net/netip"

// Protocol is the version of everything that the laptop and the traffic manager say to each other: the
// session's frames, the stream header and the control messages. Both ends must have the same.
const Protocol = 2

// The netstacks: who makes packets of the laptop's into connections.
const (
	NetstackAuto   = "auto"   // ask only: the session chooses
	NetstackGVisor = "gvisor" // the laptop; each flow is a stream
	NetstackSystem = "system" // the kernel of the traffic manager's pod; whole packets go over lanes
)

// GatewaySocket is the unix socket, an abstract one of the pod's network namespace, on which the traffic manager
// waits for the gateway. The manager's first line there is GatewayNetworks, again whenever they change; the
// gateway answers with a Gateway line that has the TUN device's descriptor with it. The connection stays: the
// device is the manager's for as long as it lasts.
const GatewaySocket = "@kubevpn-gateway"

// ClientHello is the first JSON line that the laptop writes on the control stream.
type ClientHello struct {
	Protocol  int    `json:"protocol"`
	Version   string `json:"version"`   // of the laptop's kubevpn
	Client    string `json:"client"`    // stable identity of this laptop's user; keys session affinity
	Namespace string `json:"namespace"` // the session's namespace
	Scheduler string `json:"scheduler"` // rr, lc, sh or random; empty means rr

	Netstack string         `json:"netstack,omitempty"` // NetstackGVisor or NetstackSystem: what the laptop means to use; empty means gvisor
	Lease    []netip.Addr   `json:"lease,omitempty"`    // inner addresses that it held before, to be kept
	Avoid    []netip.Prefix `json:"avoid,omitempty"`    // networks of the laptop that an inner network must not overlap
	NoGSO    bool           `json:"noGSO,omitempty"`    // its device takes no super-packets, and no packets whose checksum is left to do
}

// ControlMessage is one JSON line from the traffic manager on the control stream. Exactly one field is set.
// The first message is a Hello, the second a Names with Reset set (where the manager may watch Services).
type ControlMessage struct {
	Hello *ManagerHello `json:"hello,omitempty"`
	State *ManagerState `json:"state,omitempty"` // again, whole, whenever it changes
	Names *NameDelta    `json:"names,omitempty"`
	Error *Error        `json:"error,omitempty"` // the manager refuses the session; it ends after this
}

// ManagerHello answers ClientHello.
type ManagerHello struct {
	Protocol int          `json:"protocol"`
	Version  string       `json:"version"`
	Pod      string       `json:"pod"`
	Node     string       `json:"node,omitempty"`
	Lease    Lease        `json:"lease"`
	State    ManagerState `json:"state"`
}

// Lease is a session's inner addresses, at which other laptops and pods reach it. The zero value is none: what
// had no Client in its hello, or found every network taken. A session without a lease has no lanes.
type Lease struct {
	Addrs    []netip.Addr   `json:"addrs,omitempty"`    // at most one of each family, IPv4 first
	Networks []netip.Prefix `json:"networks,omitempty"` // the inner networks that Addrs are from, in their order
	// Resolver is a reserved address of the IPv4 network that every laptop may use inside its own tunnel.
	Resolver netip.Addr `json:"resolver,omitzero"`
}

// ManagerState is what the manager knows about the cluster's network at one moment. Prefixes are masked,
// sorted and do not overlap; both families share each list.
type ManagerState struct {
	PodCIDRs     []netip.Prefix `json:"podCIDRs,omitempty"`
	ServiceCIDRs []netip.Prefix `json:"serviceCIDRs,omitempty"`
	DNSServers   []netip.Addr   `json:"dnsServers,omitempty"` // cluster DNS, as the manager's pod sees it
	DNSDomain    string         `json:"dnsDomain,omitempty"`  // "cluster.local", without dots at its ends
	ResolvesVIPs bool           `json:"resolvesVIPs"`         // false: ClusterIPs are dialled as they are
	Missing      []string       `json:"missing,omitempty"`    // permissions the manager lacks: "list nodes"
	Sessions     int            `json:"sessions"`             // laptops connected now, this one included
	CanaryPod    netip.AddrPort `json:"canaryPod,omitzero"`   // a pod's TCP port that should accept a connection
	CanaryVIP    netip.AddrPort `json:"canaryVIP,omitzero"`   // a ClusterIP and TCP port with a ready endpoint
	CanaryName   string         `json:"canaryName,omitempty"` // the name of CanaryVIP's Service: "web.default"

	InnerNetworks []netip.Prefix `json:"innerNetworks,omitempty"` // of all sessions, to be routed into the tunnel
	Gateway       *Gateway       `json:"gateway,omitempty"`       // nil: the system netstack is not there
}

// Gateway is the privileged part in the traffic manager's pod, as it describes itself once its TUN device is up.
type Gateway struct {
	MTU      int          `json:"mtu"`
	Addrs    []netip.Addr `json:"addrs"` // of the TUN device
	IPv4     bool         `json:"ipv4"`  // packets of the family are forwarded and masqueraded
	IPv6     bool         `json:"ipv6"`
	Backend  string       `json:"backend"` // of iptables: "nft" or "legacy"
	Warnings []string     `json:"warnings,omitempty"`
}

// GatewayNetworks is what the traffic manager tells the gateway: the inner networks, to be routed to the TUN
// device. Its first address of each is the device's.
type GatewayNetworks struct {
	Networks []netip.Prefix `json:"networks"`
}

// NameDelta changes the laptop's index of Service names, by namespace. Reset means: forget what came before.
type NameDelta struct {
	Reset  bool                `json:"reset,omitempty"`
	Add    map[string][]string `json:"add,omitempty"`
	Remove map[string][]string `json:"remove,omitempty"`
}
