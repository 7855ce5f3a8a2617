package api

import (
	"cmp"
	"net/netip"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/protocol/httpmatch"
)

// ConnectRequest asks the daemon for a connection. A second request for the same cluster returns the same connection
// and sets its namespace to Namespace.
type ConnectRequest struct {
	// Kubeconfig contains one context. File paths are absolute. A credential plugin has the environment of the CLI.
	Kubeconfig []byte `json:"kubeconfig"`
	// Credential is the result of the credential plugin on the user's terminal. Nil: the kubeconfig has no plugin.
	Credential *Credential `json:"credential,omitempty"`
	Context    string      `json:"context"`
	Namespace  string      `json:"namespace"`
	// Name is the label under which names always mean this cluster: NAME.NAMESPACE.LABEL. Empty: made of Context.
	Name    string `json:"name,omitempty"`
	Upgrade bool   `json:"upgrade,omitempty"`
	// Keep lets a traffic manager that the connection installs into the user's namespace stay without laptops.
	Keep bool `json:"keep,omitempty"`
	ConnectSettings
	// Via is a workload of the namespace, as TYPE/NAME: connections leave from inside one of its pods. Empty: from the
	// traffic manager.
	Via string `json:"via,omitempty"`
	// Egress is what leaves from there: EgressCluster or empty, EgressAll, which requires a program with a network or a
	// proxy of its own, or EgressNone.
	Egress string `json:"egress,omitempty"`
	// Localhost, unless nil, gives a program with a network of its own what listens on the loopback addresses of the
	// pod of Via, except at the ports of this container, in whose place the program is; empty: the default one.
	Localhost *string `json:"localhost,omitempty"`
	Consent   Consent `json:"consent,omitzero"` // the stored consent for this cluster
	// Settings are those of ConnectSettings and of the intercept, with their origins. With the origin cluster,
	// ExtraCIDRs and ExtraDomains need the user's consent.
	Settings []Setting `json:"settings,omitempty"`
	// AddHeaders are added by a proxy to requests for http URLs of the cluster.
	AddHeaders []httpmatch.Named `json:"addHeaders,omitempty"`
	// Use accepts an existing connection as it is: its namespace stays, and only settings of flags have to be its own.
	Use bool `json:"use,omitempty"`
	// Reconnect ends the connections to the cluster first, and what uses them.
	Reconnect bool `json:"reconnect,omitempty"`
}

// ConnectSettings are the settings of the user (internal/config) that a connection has.
type ConnectSettings struct {
	ManagerNamespace string `json:"managerNamespace"` // empty: "kubevpn", else the current namespace
	Image            string `json:"image"`            // of the traffic manager; empty: not set
	// NetstackAuto (also when empty), NetstackGVisor or NetstackSystem
	Netstack string `json:"netstack"`
	// TransportAuto (also when empty), TransportPortForward, TransportAPIProxy or TransportDirect
	Transport    string         `json:"transport,omitempty"`
	Scheduler    string         `json:"scheduler"`              // of balancer: its name in IPVS
	ExtraCIDRs   []netip.Prefix `json:"extraCIDRs,omitempty"`   // masked; routed into the tunnel, too
	ExcludeCIDRs []netip.Prefix `json:"excludeCIDRs,omitempty"` // masked; never routed into the tunnel
	// Map maps networks of the cluster in any case. NoMap maps none: one that overlaps a local network is an error.
	Map   []packet.Mapping `json:"map,omitempty"`
	NoMap bool             `json:"noMap,omitempty"`
	// Cluster DNS answers names under ExtraDomains, and never those under ExcludeDomains. In lower case, without dots
	// at their ends.
	ExtraDomains   []string `json:"extraDomains,omitempty"`
	ExcludeDomains []string `json:"excludeDomains,omitempty"`
	// ports that other laptops may connect to; none by default
	AllowInbound []Inbound `json:"allowInbound,omitempty"`
	Objects      Objects   `json:"objects,omitzero"`
}

// Objects are what policies of the cluster demand of the objects that kubevpn creates, each as NAME=VALUE. A name in
// Resources begins with requests. or limits.
type Objects struct {
	Labels      []string `json:"labels,omitempty"`
	Annotations []string `json:"annotations,omitempty"`
	Resources   []string `json:"resources,omitempty"` // of the traffic manager and of agents in sidecar mode
}

// Setting returns the setting of the key; the zero Setting if the request does not have it.
func (r *ConnectRequest) Setting(key string) Setting {
	return *cmp.Or(Find(r.Settings, func(s Setting) bool { return s.Key == key }), new(Setting))
}

// Event is one JSON line of progress. The last line of a stream has Connection, Intercept or Error set.
type Event struct {
	Time       time.Time   `json:"time"`
	Entry      string      `json:"entry,omitempty"`   // of a project; Detail is a line of its output
	Step       string      `json:"step,omitempty"`    // the current step: "Installing the traffic manager"
	Detail     string      `json:"detail,omitempty"`  // an observation: the state of a pod, an address
	Done       bool        `json:"done,omitempty"`    // the step has succeeded
	Warning    string      `json:"warning,omitempty"` // a limitation or a guess, and what to ask an admin for
	Connection *Connection `json:"connection,omitempty"`
	Intercept  *Intercept  `json:"intercept,omitempty"`
	// Installed is the traffic manager that the request has installed with the user's own rights. The CLI stores it as
	// trusted.
	Installed *TrustedManager `json:"installed,omitempty"`
	// everything that an attached request asked for is established, until the request ends
	Held  bool   `json:"held,omitempty"`
	Error *Error `json:"error,omitempty"`
	TypeMeta
}

// ConnectionStatus is the state of a connection.
//
//	connecting ──▶ connected ◀──▶ reconnecting
//	     │             │               │
//	     └──────▶ disconnecting ◀──────┘        failed: ended by itself; see Error
type ConnectionStatus string

const (
	StatusConnecting    ConnectionStatus = "connecting"
	StatusConnected     ConnectionStatus = "connected"
	StatusReconnecting  ConnectionStatus = "reconnecting"
	StatusDisconnecting ConnectionStatus = "disconnecting"
	StatusFailed        ConnectionStatus = "failed"
)

// Connection is one row of `kubevpn status`.
type Connection struct {
	TypeMeta
	ID             string           `json:"id"`
	Cluster        string           `json:"cluster"` // its name in the kubeconfig
	ClusterID      string           `json:"clusterID"`
	Server         string           `json:"server"`
	Context        string           `json:"context"`
	Namespace      string           `json:"namespace"`
	Status         ConnectionStatus `json:"status"`
	Netstack       string           `json:"netstack"`
	NetstackReason string           `json:"netstackReason"`
	// of kube-proxy: "iptables", "nftables", "ipvs", "none", "served" (of an unknown kind) or "unknown"
	ProxyMode  string         `json:"proxyMode"`
	Transport  string         `json:"transport"` // the transport in use: "direct", "port-forward (spdy)"
	Transports []Transport    `json:"transports"`
	Seconds    float64        `json:"roundTripSeconds,omitempty"` // to the manager; by the last few heartbeats
	Device     string         `json:"device"`
	Via        *Via           `json:"via,omitempty"` // from where connections leave; nil: the traffic manager
	Addresses  []netip.Addr   `json:"addresses"`
	CIDRs      []netip.Prefix `json:"cidrs"` // networks of the cluster that are routed into the tunnel
	// parts of CIDRs that programs of this machine know by other addresses, because something else here has them
	Mappings         packet.Mappings `json:"mappings,omitempty"`
	Since            time.Time       `json:"since"`
	ManagerNamespace string          `json:"managerNamespace"`
	ManagerPod       string          `json:"managerPod"`
	ManagerVersion   string          `json:"managerVersion"`
	// what happens to ClusterIPs: "resolved by kubevpn", "dialed as they are: ..."
	Services string `json:"services"`
	// an admin limits which pods laptops reach
	Limited      bool      `json:"limited,omitempty"`
	DNS          DNSStatus `json:"dns"`
	SOCKS        *SOCKS    `json:"socks,omitempty"`        // the proxy that programs use in place of a device
	AllowInbound []Inbound `json:"allowInbound,omitempty"` // ports that other laptops may connect to
	Checks       []Check   `json:"checks"`                 // the results of the probe
	// as the command that connected resolved them, with those of intercepts
	Settings []Setting `json:"settings,omitempty"`
	Warnings []string  `json:"warnings,omitempty"`
	Error    *Error    `json:"error,omitempty"`
}

// Values of ConnectRequest.Egress.
const (
	EgressCluster = "cluster" // what leaves from a pod: flows to the cluster
	EgressAll     = "all"     // all flows
	EgressNone    = "none"
)

// Via is the workload from inside whose pods connections leave.
type Via struct {
	Namespace string `json:"namespace"`
	Workload  string `json:"workload"` // TYPE/NAME
	Pod       string `json:"pod"`      // empty: none now, see Error
	Error     string `json:"error,omitempty"`
}

// SOCKS is the proxy of a connection: SOCKS5 and HTTP on one address of this machine.
type SOCKS struct {
	Address  string `json:"address"` // "127.0.0.1:1080"
	User     string `json:"user"`
	Password string `json:"password"`
	PAC      string `json:"pac"` // URL of the proxy auto-configuration file
}

// The transports: ways to reach the traffic manager.
const (
	TransportAuto        = "auto" // in requests only: direct if it works, else api-proxy, else port-forward
	TransportPortForward = "port-forward"
	TransportAPIProxy    = "api-proxy"
	TransportDirect      = "direct"
)

// TransportState is the state of one transport.
type TransportState string

const (
	TransportInUse   TransportState = "in use"
	TransportStandby TransportState = "standby" // it works, but another one is in use
	TransportTrying  TransportState = "trying"  // kubevpn has not tried it to the end yet
	TransportFailing TransportState = "failing" // kubevpn tries it again
	TransportOff     TransportState = "off"     // the user requested another one
)

// Transport is one way to reach the traffic manager, with its state.
type Transport struct {
	Name     string         `json:"name"`
	State    TransportState `json:"state"`
	Reason   string         `json:"reason,omitempty"` // for State
	Since    time.Time      `json:"since,omitzero"`
	Seconds  float64        `json:"roundTripSeconds,omitempty"` // by the last few heartbeats over it
	Rate     float64        `json:"bytesPerSecond,omitempty"`   // never set: a field of the format stays
	Sent     uint64         `json:"sentBytes"`                  // in this session
	Received uint64         `json:"receivedBytes"`
}

// DNSStatus describes how the names of the cluster are resolved.
type DNSStatus struct {
	Mode   ResolverMode `json:"mode"`
	Domain string       `json:"domain"`
	// Alias is the label under which names always mean this cluster: web.shop.ALIAS. Empty: none.
	Alias string `json:"alias,omitempty"`
	// Limited: short names are those of Services in the connection's namespace only, for want of rights.
	Limited bool         `json:"limited,omitempty"`
	Servers []netip.Addr `json:"servers"`
	// the nameserver of programs with a search list of their own: it gives names no namespace
	Programs netip.Addr `json:"programs,omitzero"`
	// ExtraDomains are further domains whose names cluster DNS answers, ExcludeDomains those whose names it never does.
	ExtraDomains   []string `json:"extraDomains,omitempty"`
	ExcludeDomains []string `json:"excludeDomains,omitempty"`
	Hosts          []Host   `json:"hosts,omitempty"` // recent addresses of names under ExtraDomains, sorted
	// answers that were served after their TTL, because the connection was interrupted
	StaleAnswers int64 `json:"staleAnswers,omitempty"`
}

// Host is an address that cluster DNS gave for a name under an extra domain. It stays until its TTL has passed and the
// last flow to it has ended.
type Host struct {
	Address netip.Addr `json:"address"`
	Name    string     `json:"name"` // the one that was asked last
	Routed  bool       `json:"routed"`
	Reason  string     `json:"reason,omitempty"` // why it is not routed into the tunnel
}

// Check is the result of one probe of the tunnel.
type Check struct {
	What    string  `json:"what"`   // "name", "pod" or "clusterIP"
	Target  string  `json:"target"` // "kubernetes.default", "10.244.1.5:8080"
	OK      bool    `json:"ok"`
	Seen    string  `json:"seen"` // "10.96.0.1", "connected in 3ms", "connection refused"
	Seconds float64 `json:"seconds"`
}

// Status is the answer to PathStatus. Connections and Intercepts are never null.
type Status struct {
	TypeMeta
	Version     string       `json:"version"`
	Machine     string       `json:"machine,omitempty"` // its kind, if it is not a usual one: container, WSL 1, WSL 2
	Helper      string       `json:"helper,omitempty"`  // what started the root helper: sudo, service; empty: none
	Connections []Connection `json:"connections"`
	Intercepts  []Intercept  `json:"intercepts"`
	Projects    []Project    `json:"projects,omitempty"` // that `kubevpn up` keeps
}

// DisconnectRequest ends the connections with these IDs, or all of them. If no connection is left, the daemon answers
// when the helper has removed everything.
type DisconnectRequest struct {
	IDs []string `json:"ids,omitempty"`
	All bool     `json:"all,omitempty"`
}
