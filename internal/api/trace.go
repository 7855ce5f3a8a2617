package api

import (
	"net/netip"

	"kubevpn/pkg/protocol/httpmatch"
)

const (
	// TraceHeader marks the request of `kubevpn why` with its trace ID: 32 hexadecimal digits.
	TraceHeader = "Kubevpn-Why"
	// TraceParent is the header of W3C's Trace Context. Programs that propagate it carry the trace ID on.
	TraceParent = "Traceparent"
)

// AgentTrace is what an agent knows of the requests with one trace ID, for the owner that announced it.
type AgentTrace struct {
	Requests []TracedRequest `json:"requests,omitempty"`
	// Older are clients with connections to the application that the agent does not see, at ports of the owner's
	// claims. The connections began before the agent, or bypass it.
	Older []netip.AddrPort `json:"older,omitempty"`
}

// TracedRequest is a request that reached an agent.
type TracedRequest struct {
	Port   uint16        `json:"port"` // of the pod
	Claims []TracedClaim `json:"claims"`
	To     int           `json:"to"` // index of the claim that got it; -1: the application
	// Fits are those of the order's matches that the request satisfies, as Match.String describes them.
	Fits []string `json:"fits,omitempty"`
}

// TracedClaim is a claim that the agent tried on a request.
type TracedClaim struct {
	Owner       string                 `json:"owner"`
	Mine        bool                   `json:"mine,omitempty"`
	Match       string                 `json:"match"`                 // for people
	Away        bool                   `json:"away,omitempty"`        // the owner does not answer
	Differences []httpmatch.Difference `json:"differences,omitempty"` // none: it matches
}

// TraceRequest asks the daemon to announce a trace ID to the agents of all its intercepts, and for what they have
// noted.
type TraceRequest struct {
	Trace string `json:"trace"`
}

// InterceptTrace is what the agents of one intercept know of a trace ID. PathTrace answers a list of them.
type InterceptTrace struct {
	Connection string         `json:"connection"`
	Namespace  string         `json:"namespace"`
	Workload   string         `json:"workload"`
	Match      httpmatch.Spec `json:"match,omitzero"`
	Mirror     bool           `json:"mirror,omitempty"`
	Clone      bool           `json:"clone,omitempty"`
	Ports      []PortMap      `json:"ports"`
	// Shortcuts are addresses that programs of this machine reach without the cluster, with the intercepted port.
	Shortcuts map[netip.AddrPort]uint16 `json:"shortcuts,omitempty"`
	Pods      []PodTrace                `json:"pods"`
	Changes   []string                  `json:"changes,omitempty"` // by others, which keep requests away
}

// PodTrace is what the agent of one pod knows of a trace ID.
type PodTrace struct {
	Pod    string      `json:"pod"`
	Reason string      `json:"reason,omitempty"` // why the pod has no agent of this laptop
	Error  string      `json:"error,omitempty"`  // why its agent did not tell anything
	Trace  *AgentTrace `json:"trace,omitempty"`
}
