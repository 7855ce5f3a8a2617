package api

import (
	"net/netip"
	"time"
)

// The traffic agent is a container of a workload's pod. Agents of one pod share its network namespace, and one of them, the
// primary, has the redirects; the others stand by.
const (
	// AgentSocket is a unix socket, an abstract one of the pod's network namespace. Who has bound it is the primary.
	AgentSocket = "@kubevpn-agent"
	// AgentPrefix begins the name of every agent's container: kubevpn-agent-1, kubevpn-agent-2.
	AgentPrefix = "kubevpn-agent-"
	// AgentOwnerVariable of the agent's environment is the hash of the public key whose holder may give it orders: KeyHash. It
	// is no secret. The private key stays in the memory of the laptop's daemon.
	AgentOwnerVariable = "KUBEVPN_OWNER"
	// AgentNameVariable is what the owner is called: user@host.
	AgentNameVariable = "KUBEVPN_OWNER_NAME"
	// AgentGreetVariable is a port of 127.0.0.1 in the pod, which the owner has chosen: who connects there within the agent's
	// first minute is told its latest AgentGreeting, as a JSON line, and the connection ends. The owner does by
	// pods/portforward, because a container's log is to be had only up to a second after its start.
	AgentGreetVariable = "KUBEVPN_GREET"
)

// AgentGreeting is a JSON line on the agent's standard output: to which agent of the pod the owner has to go. Who can read
// the container's log can believe it, as it is the kubelet that gives it. There is another one whenever the primary is another.
// The same may come from the port of AgentGreetVariable, sooner: then it is believed to be somebody's of that pod.
type AgentGreeting struct {
	Protocol int    `json:"protocol"` // Protocol
	Version  string `json:"version"`
	Port     uint16 `json:"port"` // of the pod, where the primary takes carriers
	Key      string `json:"key"`  // KeyHash of the primary's key
	Error    *Error `json:"error,omitempty"`
}

// AgentHello is the first JSON line of the laptop on the control stream to the primary.
type AgentHello struct {
	Protocol int    `json:"protocol"`
	Version  string `json:"version"`
}

// AgentOrder is a JSON line of the laptop on the control stream. Exactly one field is set. Each is answered by an AgentReport
// with the same ID.
type AgentOrder struct {
	ID      uint64      `json:"id"`
	Claim   *ClaimOrder `json:"claim,omitempty"`
	Release string      `json:"release,omitempty"` // a claim's ID
	Canary  *Canary     `json:"canary,omitempty"`
	Reset   bool        `json:"reset,omitempty"` // all claims of everybody; the agent ends
}

// ClaimOrder asks for requests. The same ID again replaces the claim.
type ClaimOrder struct {
	ID     string          `json:"id"`
	Match  MatchSpec       `json:"match,omitzero"`
	Ports  []AgentPort     `json:"ports"`
	Mirror bool            `json:"mirror,omitempty"`
	Flush  bool            `json:"flush,omitempty"`
	Since  time.Time       `json:"since"`
	TLS    *TLSTermination `json:"tls,omitempty"`
	// Clone are addresses of pods that get the requests in the laptop's place, by turns, at the same ports, as long as the laptop
	// is there. Nil: the laptop gets them. Of none, the application does.
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

// Canary tells the primary of a connection that will begin with these bytes, and wants to know whether it came: the report
// to it has Seen. The connection is answered with the same bytes and closed.
type Canary struct {
	Preface []byte `json:"preface"` // CanaryLength bytes, of which the first are CanaryPrefix and the rest random
}

const (
	CanaryPrefix = "\x00kubevpn canary\x00"
	CanaryLength = 32
)

// AgentReport is a JSON line of the primary on the control stream. State is whole, and comes whenever it changes, at most
// every 200 ms.
type AgentReport struct {
	ID    uint64      `json:"id,omitempty"` // of the order that it answers
	Error *Error      `json:"error,omitempty"`
	State *AgentState `json:"state,omitempty"`
}

// AgentState is what the primary does.
type AgentState struct {
	Claims []Claim `json:"claims"` // of everybody
	Source string  `json:"source"` // how the application sees where a request comes from: "address", or "header" (X-Forwarded-For) with why
}

// Claim is who has which requests.
type Claim struct {
	ID        string      `json:"id"`
	Owner     string      `json:"owner"`          // AgentNameVariable
	Mine      bool        `json:"mine,omitempty"` // of the laptop that is told
	Away      bool        `json:"away,omitempty"` // the owner does not answer: requests go to the application
	Match     string      `json:"match"`          // for people
	Mirror    bool        `json:"mirror,omitempty"`
	Ports     []AgentPort `json:"ports"`
	Since     time.Time   `json:"since"`
	Requests  uint64      `json:"requests"`
	LastError string      `json:"lastError,omitempty"`
	Notes     []string    `json:"notes,omitempty"` // what was seen of its ports: "TLS: headers cannot match"
}
