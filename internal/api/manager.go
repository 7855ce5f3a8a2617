package api

import "net/netip"

// The netstacks, which turn packets of the laptop into traffic of a pod.
const (
	NetstackAuto   = "auto"   // in requests only: kubevpn chooses
	NetstackGVisor = "gvisor" // gvisor on the laptop; each flow is a stream
	NetstackSystem = "system" // the kernel of the traffic manager's pod; whole packets go over packet streams
)

// GatewaySocket is an abstract unix socket of the pod's network namespace, on which the traffic manager waits for the
// gateway. The manager sends GatewayNetworks at first and whenever they change. The gateway answers with Gateway and
// the descriptor of the TUN device (unixsocket.Conn). The manager uses the device until the connection ends.
const GatewaySocket = "@kubevpn-gateway"

// What a node does with a ClusterIP, in ManagerState.NodeServes.
const (
	NodeServesNothing   = "nothing"   // no answer: nothing serves ClusterIPs on the node, or a policy forbids the dial
	NodeServesClusterIP = "clusterIP" // the ClusterIP accepted a connection
	NodeServesAsAddress = "address"   // it did, and is an address of the node, which IPVS makes it
)

// ClientHello is the first JSON line that the laptop writes on the control stream. The manager ignores fields that it
// does not know, so a field that the session can do without needs no new protocol version.
type ClientHello struct {
	Protocol int    `json:"protocol"`                 // the newest that the laptop speaks
	Oldest   int    `json:"oldestProtocol,omitempty"` // 0: Protocol alone
	Version  string `json:"version"`                  // of the laptop's kubevpn
	// Client is a secret that identifies this user of this laptop to this manager, which binds leases and session
	// affinity to it.
	Client    string `json:"client"`
	Namespace string `json:"namespace"` // the session's namespace
	Scheduler string `json:"scheduler"` // rr, lc, sh or random; empty means rr

	// Netstack is the one that the laptop intends to use: NetstackGVisor or NetstackSystem; empty means gvisor.
	Netstack string `json:"netstack,omitempty"`
	// MayUseGVisor: the laptop uses gvisor instead if the manager's state says GVisorOnly.
	MayUseGVisor bool         `json:"mayUseGVisor,omitempty"`
	Lease        []netip.Addr `json:"lease,omitempty"` // previous inner addresses, to get them again
	// Avoid lists networks of the laptop that an inner network must not overlap.
	Avoid []netip.Prefix `json:"avoid,omitempty"`
	// ExtraCIDRs are the networks of --extra-cidr: the session may dial nodes and the API server in them.
	ExtraCIDRs []netip.Prefix `json:"extraCIDRs,omitempty"`
	// NoGSO: the laptop's device accepts neither super-packets nor packets with a partial checksum.
	NoGSO bool `json:"noGSO,omitempty"`
	// Identifies: the laptop answers a Challenge.
	Identifies bool `json:"identifies,omitempty"`
}

// ControlMessage is one JSON line from the traffic manager on the control stream. Exactly one field is set.
// The first message is a Hello, perhaps after a Challenge, the next a Names with Reset set (if the manager may watch
// Services).
type ControlMessage struct {
	Hello *ManagerHello `json:"hello,omitempty"`
	State *ManagerState `json:"state,omitempty"` // again, whole, whenever it changes
	Names *NameDelta    `json:"names,omitempty"`
	Error *Error        `json:"error,omitempty"` // the manager rejects the session and ends it
	// Challenge is the first message of a manager that asks for the laptop's user. The laptop answers with an Identity.
	Challenge *Challenge `json:"challenge,omitempty"`
}

// Challenge asks the laptop to create a CertificateSigningRequest for IdentitySigner, whose subject has the common name
// Nonce and the manager's namespace as its organizational unit. Nobody signs it. The API server writes the user and
// groups into it, which nobody can change later (spec.username: KEP-1513). The namespace keeps another manager from
// passing a Nonce on to laptops that trust it.
type Challenge struct {
	Nonce string `json:"nonce"` // random, for one session
}

// Identity answers a Challenge.
type Identity struct {
	Request string `json:"certificateSigningRequest"` // its name
}

// IdentitySigner is the signerName of a CertificateSigningRequest by which a laptop identifies its user.
const IdentitySigner = "kubevpn.dev/identity"

// ManagerHello answers ClientHello.
type ManagerHello struct {
	Protocol int          `json:"protocol"` // of the session: CommonProtocol
	Version  string       `json:"version"`
	Pod      string       `json:"pod"`
	Node     string       `json:"node,omitempty"`
	Lease    Lease        `json:"lease"`
	State    ManagerState `json:"state"`
}

// Lease contains the inner addresses of a session, at which other laptops and pods reach the laptop. It is zero if
// ClientHello.Client is empty or no network is free. A session without a lease has no packet streams.
type Lease struct {
	Addrs    []netip.Addr   `json:"addrs,omitempty"`    // at most one of each family, IPv4 first
	Networks []netip.Prefix `json:"networks,omitempty"` // the inner networks that Addrs are from, in their order
	// Resolver is a reserved address of the IPv4 network that every laptop may use inside its own tunnel.
	Resolver netip.Addr `json:"resolver,omitzero"`
}

// ManagerState describes the cluster's network as the manager knows it at one moment. Prefixes are masked, sorted and
// do not overlap; both families share each list.
type ManagerState struct {
	PodCIDRs     []netip.Prefix `json:"podCIDRs,omitempty"`
	ServiceCIDRs []netip.Prefix `json:"serviceCIDRs,omitempty"`
	// The Stated fields contain those networks that Nodes (spec.podCIDRs) and ServiceCIDR objects state. The manager
	// guesses the others from addresses that it sees.
	StatedPodCIDRs     []netip.Prefix `json:"statedPodCIDRs,omitempty"`
	StatedServiceCIDRs []netip.Prefix `json:"statedServiceCIDRs,omitempty"`
	// Ignored are some of the pod networks outside of private address space that EndpointSlices show. No other list
	// contains them.
	Ignored []netip.Prefix `json:"ignored,omitempty"`

	DNSServers []netip.Addr `json:"dnsServers,omitempty"` // cluster DNS, as the manager's pod sees it
	DNSDomain  string       `json:"dnsDomain,omitempty"`  // "cluster.local", without dots at its ends
	// ResolvesVIPs: the manager resolves ClusterIPs to endpoints. Otherwise it dials them as they are.
	ResolvesVIPs bool `json:"resolvesVIPs"`
	// Namespaces are those whose Services the manager watches, as far as nothing is Missing. Empty: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// Limited: the manager dials only Services of Namespaces, and pods behind them.
	Limited bool `json:"limited,omitempty"`
	// Authorized: of these pods it dials those of which the user may forward ports.
	Authorized bool `json:"authorized,omitempty"`
	// GVisorOnly: an admin limits what the manager dials, and kube-proxy picks endpoints in the system netstack.
	GVisorOnly bool           `json:"gvisorOnly,omitempty"`
	Missing    []string       `json:"missing,omitempty"`   // permissions the manager lacks: "list nodes"
	Sessions   int            `json:"sessions"`            // laptops connected now, this one included
	ProbePod   netip.AddrPort `json:"probePod,omitzero"`   // a pod's TCP port that should accept a connection
	ProbeVIP   netip.AddrPort `json:"probeVIP,omitzero"`   // a ClusterIP and TCP port with a ready endpoint
	ProbeName  string         `json:"probeName,omitempty"` // the name of ProbeVIP's Service: "web.default"

	// Direct are the addresses ("HOST:PORT") of the manager's proxy port: its pod's, those of a node port or of a load
	// balancer that leads to it. At most MaxDirect. A laptop may reach any of them, or none.
	Direct []string `json:"direct,omitempty"`

	// NodeServes is what the manager saw when it dialed the API server's ClusterIP as it is, past its own choice of
	// endpoints: a NodeServes constant, or empty if it knows no ClusterIP.
	NodeServes string `json:"nodeServes,omitempty"`

	InnerNetworks []netip.Prefix `json:"innerNetworks,omitempty"` // of all sessions, to be routed into the tunnel
	Gateway       *Gateway       `json:"gateway,omitempty"`       // nil: the system netstack is unavailable
}

// Gateway describes the traffic gateway. The gateway sends it when its TUN device is up.
type Gateway struct {
	MTU      int          `json:"mtu"`
	Addrs    []netip.Addr `json:"addrs"` // of the TUN device
	IPv4     bool         `json:"ipv4"`  // packets of the family are forwarded and masqueraded
	IPv6     bool         `json:"ipv6"`
	Backend  string       `json:"backend"` // of iptables: "nft" or "legacy"
	Warnings []string     `json:"warnings,omitempty"`
}

// GatewayNetworks are the inner networks that the gateway routes to its TUN device. The first address of each network
// belongs to the device.
type GatewayNetworks struct {
	Networks []netip.Prefix `json:"networks"`
}

// MaxDirect limits ManagerState.Direct.
const MaxDirect = 8

// NameDelta changes the laptop's index of Service names by namespace. Reset clears the index first.
type NameDelta struct {
	Reset  bool                `json:"reset,omitempty"`
	Add    map[string][]string `json:"add,omitempty"`
	Remove map[string][]string `json:"remove,omitempty"`
	// Services of the index whose DNS records may have changed. A manager that does not know sends Reset instead.
	Changed map[string][]string `json:"changed,omitempty"`
}
