package api

import (
	"net/netip"
	"time"
)

// ConnectRequest asks the daemon for a connection. A second request for the same cluster is the same
// connection; its Namespace, if another, becomes the connection's.
type ConnectRequest struct {
	// Kubeconfig has one context, with file paths absolute and the CLI's environment put into its exec
	// plugin, if it has one.
	Kubeconfig       []byte         `json:"kubeconfig"`
	Context          string         `json:"context"`
	Namespace        string         `json:"namespace"`
	ManagerNamespace string         `json:"managerNamespace"` // empty: "kubevpn", else the current namespace
	Image            string         `json:"image"`
	Upgrade          bool           `json:"upgrade,omitempty"`
	Netstack         string         `json:"netstack"`            // NetstackAuto (also when empty), NetstackGVisor or NetstackSystem
	Transport        string         `json:"transport,omitempty"` // TransportAuto (also when empty), TransportPortForward or TransportAPIProxy
	Scheduler        string         `json:"scheduler"`
	ExtraCIDRs       []netip.Prefix `json:"extraCIDRs,omitempty"`
	ExcludeCIDRs     []netip.Prefix `json:"excludeCIDRs,omitempty"`
	// Use takes a connection that is there as it is: its namespace stays, and settings of it that are others are not told.
	Use bool `json:"use,omitempty"`
}

// Event is one JSON line of progress. The last line of a stream has Connection, Intercept or Error set.
type Event struct {
	Time       time.Time   `json:"time"`
	Step       string      `json:"step,omitempty"`    // what is being done: "Installing the traffic manager"
	Detail     string      `json:"detail,omitempty"`  // what was seen: the pod's state, an address
	Done       bool        `json:"done,omitempty"`    // the step has ended well
	Warning    string      `json:"warning,omitempty"` // something lost or guessed, and what to ask an admin for
	Connection *Connection `json:"connection,omitempty"`
	Intercept  *Intercept  `json:"intercept,omitempty"`
	Held       bool        `json:"held,omitempty"` // what an attached request asked for is there, until the request ends
	Error      *Error      `json:"error,omitempty"`
}

// ConnectionStatus is the state of a connection.
//
//	connecting ──▶ connected ◀──▶ reconnecting
//	     │             │               │
//	     └──────▶ disconnecting ◀──────┘        failed: ended by itself; Error says why
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
	ID               string           `json:"id"`
	Cluster          string           `json:"cluster"` // the kubeconfig's name for it
	Server           string           `json:"server"`
	Context          string           `json:"context"`
	Namespace        string           `json:"namespace"`
	Status           ConnectionStatus `json:"status"`
	Netstack         string           `json:"netstack"`
	NetstackReason   string           `json:"netstackReason"`
	ProxyMode        string           `json:"proxyMode"` // kube-proxy's: "iptables", "nftables", "ipvs", "none" or "unknown"
	Transport        string           `json:"transport"` // of the transports, the one in use: "api-proxy", "port-forward (spdy)"
	Transports       []Transport      `json:"transports"`
	Device           string           `json:"device"`
	Addresses        []netip.Addr     `json:"addresses"`
	CIDRs            []netip.Prefix   `json:"cidrs"` // what is routed into the tunnel
	Since            time.Time        `json:"since"`
	ManagerNamespace string           `json:"managerNamespace"`
	ManagerPod       string           `json:"managerPod"`
	ManagerVersion   string           `json:"managerVersion"`
	Services         string           `json:"services"` // "resolved by kubevpn" or "dialled as they are: ..."
	DNS              DNSStatus        `json:"dns"`
	Checks           []Check          `json:"checks"` // what was tried before "Connected"
	Warnings         []string         `json:"warnings,omitempty"`
	Error            *Error           `json:"error,omitempty"`
}

// The transports: the ways that a session's bytes take to the traffic manager.
const (
	TransportAuto        = "auto" // ask only: api-proxy unless it does worse, else port-forward
	TransportPortForward = "port-forward"
	TransportAPIProxy    = "api-proxy"
)

// TransportState is what became of one transport.
type TransportState string

const (
	TransportInUse   TransportState = "in use"
	TransportStandby TransportState = "standby" // it works; the other is in use
	TransportTrying  TransportState = "trying"
	TransportFailing TransportState = "failing" // and is tried again
	TransportOff     TransportState = "off"     // another was asked for
)

// Transport is one way to the traffic manager, and how it does.
type Transport struct {
	Name     string         `json:"name"`
	State    TransportState `json:"state"`
	Reason   string         `json:"reason,omitempty"` // for the state
	Since    time.Time      `json:"since,omitzero"`
	Seconds  float64        `json:"roundTripSeconds,omitempty"` // the least, when it was measured
	Rate     float64        `json:"bytesPerSecond,omitempty"`   // there and back, the most, when it was measured
	Sent     uint64         `json:"sentBytes"`                  // in this session
	Received uint64         `json:"receivedBytes"`
}

// DNSStatus says how names reach the cluster.
type DNSStatus struct {
	Mode    ResolverMode `json:"mode"`
	Domain  string       `json:"domain"`
	Servers []netip.Addr `json:"servers"`
}

// Check is one proof that the tunnel works, and what it saw.
type Check struct {
	What    string  `json:"what"`   // "name", "pod" or "clusterIP"
	Target  string  `json:"target"` // "kubernetes.default", "10.244.1.5:8080"
	OK      bool    `json:"ok"`
	Seen    string  `json:"seen"` // "10.96.0.1", "connected in 3ms", "connection refused"
	Seconds float64 `json:"seconds"`
}

// Status answers `kubevpn status`. Connections and Intercepts are never null.
type Status struct {
	Version     string       `json:"version"`
	Connections []Connection `json:"connections"`
	Intercepts  []Intercept  `json:"intercepts"`
}

// DisconnectRequest ends the connections with these IDs, or all of them.
type DisconnectRequest struct {
	IDs []string `json:"ids,omitempty"`
	All bool     `json:"all,omitempty"`
}
