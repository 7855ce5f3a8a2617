package api

import (
	"net/netip"
	"time"
)

// FlowList is the output of `kubevpn flows`, and a line of PathFlows.
type FlowList struct {
	TypeMeta
	Time     time.Time `json:"time"`
	Items    []Flow    `json:"items"` // the highest rates first; as many as the request allows
	Total    FlowTotal `json:"total"`
	Warnings []string  `json:"warnings,omitempty"` // what the list lacks, and why
}

// FlowTotal sums up all flows, also those that the list leaves out.
type FlowTotal struct {
	Flows        int     `json:"flows"`
	Stalled      int     `json:"stalled"`
	SentRate     float64 `json:"sentBytesPerSecond"`
	ReceivedRate float64 `json:"receivedBytesPerSecond"`
}

// Flow is one flow of a program of this machine. Unknown fields are missing, or 0.
type Flow struct {
	Connection  string         `json:"connection"`        // its ID
	Program     string         `json:"program,omitempty"` // its name, which it may choose
	PID         int            `json:"pid,omitempty"`
	Protocol    string         `json:"protocol"` // "tcp", "udp", "icmp", or "ip/132" with the number of another
	Source      netip.AddrPort `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	Name        ObjectName     `json:"name,omitzero"` // of the destination
	Since       time.Time      `json:"since,omitzero"`
	// Counted is false if nothing counts the bytes of the flow.
	Counted      bool    `json:"counted"`
	Sent         uint64  `json:"sentBytes"` // by the program
	Received     uint64  `json:"receivedBytes"`
	SentRate     float64 `json:"sentBytesPerSecond"`
	ReceivedRate float64 `json:"receivedBytesPerSecond"`
	Seconds      float64 `json:"roundTripSeconds,omitempty"`
	RoundTripTo  string  `json:"roundTripTo,omitempty"` // RoundTripManager or RoundTripDestination
	Retransmits  uint32  `json:"retransmits,omitempty"` // of the program's own kernel
	Stall        Stall   `json:"stall,omitempty"`
	StallSeconds float64 `json:"stallSeconds,omitempty"` // at least
	Transport    string  `json:"transport,omitempty"`
	Link         *int    `json:"link,omitempty"` // of the session; null: the packets of the flow may use several
}

// Shortcut is the Transport of a flow to a workload that this machine intercepts: what matches stays on this machine.
const Shortcut = "shortcut"

// The far ends of a flow's round trip.
const (
	RoundTripManager     = "manager"     // measured by the link that carries the flow
	RoundTripDestination = "destination" // measured by the kernel of this machine
)

// Stall says why bytes wait and none has moved for at least a second.
type Stall string

const (
	StallProgram     Stall = "program"     // the program does not read what has arrived
	StallDestination Stall = "destination" // the destination does not take what the program sends
	StallConnecting  Stall = "connecting"  // the destination has not answered the program's connect
	StallTunnel      Stall = "tunnel"      // no conn carries the flow at the moment
)

// ObjectName is the name of an object that has an address: a Service, a pod, or a host outside of the cluster.
type ObjectName struct {
	Kind      string `json:"kind"` // "service", "pod" or "host"
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}
