package api

import (
	"net/netip"
	"strings"
	"time"

	"kubevpn/pkg/protocol/httpmatch"
)

// The traffic agent is a container of a workload's pod. Agents of one pod share its network namespace, and one of them,
// the leader, does the work; the others stand by.
const (
	// AgentSocket is an abstract unix socket of the pod's network namespace. The agent that has bound it is the leader.
	AgentSocket = "@kubevpn-agent"
	// AgentPrefix begins the name of every agent's container: kubevpn-agent-1, kubevpn-agent-2.
	AgentPrefix = "kubevpn-agent-"
	// AgentOwnerVariable of the agent's environment is the KeyHash of the owner's public key. The holder of the private
	// key may give the agent orders. The hash is no secret.
	AgentOwnerVariable = "KUBEVPN_OWNER"
	// AgentNameVariable is the owner's name: user@host.
	AgentNameVariable = "KUBEVPN_OWNER_NAME"
	// AgentAddressesVariable has the addresses of the agent's pod, separated by commas.
	AgentAddressesVariable = "POD_IP"
	// AgentNodeVariable has the address of the pod's node, and AgentPodVariable an AgentPod as JSON; empty: the zero
	// one. They are for ephemeral agents: neither probes nor calls within the pod come to a sidecar.
	AgentNodeVariable = "KUBEVPN_NODE_IP"
	AgentPodVariable  = "KUBEVPN_POD"
	// AgentInfoPortVariable is a port of 127.0.0.1 in the pod, which the owner has chosen. In its first minute, the
	// agent sends every client there its latest AgentInfo, as a JSON line, and closes the connection. The owner
	// connects by pods/portforward, because a container's log is available only up to a second after its start.
	AgentInfoPortVariable = "KUBEVPN_INFO_PORT"
)

// AgentPod is what an agent must know of its pod's spec.
type AgentPod struct {
	Checks []httpmatch.Check `json:"checks,omitempty"` // of the kubelet, that no User-Agent shows
	Within bool              `json:"within,omitempty"` // several containers may call each other
	Users  []uint32          `json:"users,omitempty"`  // of containers whose calls are, or may be, commands of probes
}

// IsAgent reports whether a container with that name is an agent.
func IsAgent(container string) bool { return strings.HasPrefix(container, AgentPrefix) }

// AgentInfo is a JSON line on the agent's standard output. It names the agent of the pod to which the owner connects.
// It is trustworthy if Leader is LeaderSelf, because the kubelet serves the container's log. The agent prints another
// one whenever the leader changes, and a leader whenever another agent registers. The port of AgentInfoPortVariable may
// serve it sooner; that only proves that a container of the pod sent it.
type AgentInfo struct {
	Protocol int    `json:"protocol"`                 // the newest that the leader speaks
	Oldest   int    `json:"oldestProtocol,omitempty"` // 0: Protocol alone
	Version  string `json:"version"`
	Port     uint16 `json:"port"` // of the pod, where the leader accepts laptops' conns
	Key      string `json:"key"`  // KeyHash of the leader's key
	// Leader is LeaderSelf if the agent that prints the line is the leader. Then the key is authentic. It is
	// LeaderOther if the agent repeats what a program told it that had bound AgentSocket, which any container of the
	// pod can do. Empty: the agent is older, and the line can be either.
	Leader string `json:"leader,omitempty"`
	Error  *Error `json:"error,omitempty"`
}

// Values of AgentInfo.Leader.
const (
	LeaderSelf  = "self"
	LeaderOther = "other"
)

// AgentHello is the first JSON line of the laptop on the control stream to the leader. Both ends use CommonProtocol.
type AgentHello struct {
	Protocol int    `json:"protocol"`
	Oldest   int    `json:"oldestProtocol,omitempty"`
	Version  string `json:"version"`
	// MayExec says that the laptop's user may exec in the pod. Its flows then reach whatever the pod's processes reach.
	MayExec bool `json:"mayExec,omitempty"`
	Listens bool `json:"listens,omitempty"` // asks for AgentState.Listens
}

// AgentOrder is a JSON line of the laptop on the control stream. Beside ID, exactly one field is set. The agent answers
// each with an AgentReport of the same ID.
type AgentOrder struct {
	ID      uint64      `json:"id"`
	Claim   *ClaimOrder `json:"claim,omitempty"`
	Release string      `json:"release,omitempty"` // a claim's ID
	Probe   *Probe      `json:"probe,omitempty"`
	Reset   bool        `json:"reset,omitempty"` // remove the claims of all owners; then the agent ends
	// Trace is a trace ID. For half a minute the agent notes what it does with requests that carry it, and its
	// answer says what it has noted.
	Trace string `json:"trace,omitempty"`
	// Wanted, with Trace, are the matches of all of the owner's intercepts, in this pod and in others.
	Wanted []httpmatch.Spec `json:"wanted,omitempty"`
	Names  bool             `json:"names,omitempty"` // asks for the pod's name resolution
}

// ClaimOrder asks for requests of the pod. The same ID again replaces the claim.
type ClaimOrder struct {
	ID     string         `json:"id"`
	Match  httpmatch.Spec `json:"match,omitzero"`
	Ports  []AgentPort    `json:"ports"`
	Mirror bool           `json:"mirror,omitempty"`
	// Observe, with Mirror, means that the laptop gets no copies: it only records.
	Observe bool            `json:"observe,omitempty"`
	Flush   bool            `json:"flush,omitempty"`
	Cache   bool            `json:"cache,omitempty"` // answers keep their Cache-Control; or else it is no-store
	Since   time.Time       `json:"since"`
	TLS     *TLSTermination `json:"tls,omitempty"`
	// Clone lists pods that receive the requests in turn, on the same ports, while the laptop is attached. Nil: the
	// laptop receives them. Without addresses, the application receives them.
	Clone *ClonePods `json:"clone,omitempty"`
}

// ClonePods are the pods of a clone that are ready.
type ClonePods struct {
	Addresses []netip.Addr `json:"addresses"`
}

// AgentPort is a port of the pod.
type AgentPort struct {
	Protocol string `json:"protocol"`         // "tcp" or "udp"
	Port     uint16 `json:"port"`             // where requests arrive
	Listen   uint16 `json:"listen,omitempty"` // sidecar only: where the agent listens for them; no redirect
}

// Probe announces a connection that will begin with these bytes. The agent answers it with the same bytes and closes
// it, which proves that traffic to the port reaches the agent.
type Probe struct {
	Preface []byte `json:"preface"` // ProbeLength bytes, of which the first are ProbePrefix and the rest random
}

const (
	ProbePrefix = "\x00kubevpn probe\x00"
	ProbeLength = 32
)

// AgentReport is a JSON line of the leader on the control stream. It sends the complete State whenever that changes, at
// most every 200 ms.
type AgentReport struct {
	ID    uint64      `json:"id,omitempty"` // of the order that it answers
	Error *Error      `json:"error,omitempty"`
	State *AgentState `json:"state,omitempty"`
	Trace *AgentTrace `json:"trace,omitempty"` // answers AgentOrder.Trace
	Names *PodNames   `json:"names,omitempty"` // answers AgentOrder.Names
}

// PodNames is the name resolution of a pod: what its resolv.conf and its hosts file contain.
type PodNames struct {
	Servers []netip.Addr `json:"servers,omitempty"`
	Search  []string     `json:"search,omitempty"`
	Options []string     `json:"options,omitempty"` // such as "ndots:5"
	Hosts   string       `json:"hosts,omitempty"`   // the file
}

// AgentState is the state of the leader.
type AgentState struct {
	Claims []Claim `json:"claims"` // of all owners
	// how the application learns the client's address: "address", or "header: " (X-Forwarded-For) and the reason
	Source string `json:"source"`
	// Listens are the addresses at which TCP sockets of the pod listen, except those of the agent, sorted.
	Listens []netip.AddrPort `json:"listens,omitempty"`
}

// Claim is one intercept in this pod.
type Claim struct {
	ID        string      `json:"id"`
	Owner     string      `json:"owner"`          // AgentNameVariable
	Mine      bool        `json:"mine,omitempty"` // the receiver of the report owns it
	Away      bool        `json:"away,omitempty"` // the owner does not answer: requests go to the application
	Match     string      `json:"match"`          // for people
	Mirror    bool        `json:"mirror,omitempty"`
	Ports     []AgentPort `json:"ports"`
	Since     time.Time   `json:"since"`
	Requests  uint64      `json:"requests"`
	LastError string      `json:"lastError,omitempty"`
	Notes     []string    `json:"notes,omitempty"` // remarks about its ports: "TLS: headers cannot match"
}
