package api

import "net/netip"

// Protocol is the version of everything that the laptop and the traffic manager say to each other: the
// session's frames, the stream header and the control messages. Both ends must have the same.
const Protocol = 1

// ClientHello is the first JSON line that the laptop writes on the control stream.
type ClientHello struct {
	Protocol  int    `json:"protocol"`
	Version   string `json:"version"`   // of the laptop's kubevpn
	Client    string `json:"client"`    // stable identity of this laptop's user; keys session affinity
	Namespace string `json:"namespace"` // the session's namespace
	Scheduler string `json:"scheduler"` // rr, lc, sh or random; empty means rr
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
	State    ManagerState `json:"state"`
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
}

// NameDelta changes the laptop's index of Service names, by namespace. Reset means: forget what came before.
type NameDelta struct {
	Reset  bool                `json:"reset,omitempty"`
	Add    map[string][]string `json:"add,omitempty"`
	Remove map[string][]string `json:"remove,omitempty"`
}
