package api

import (
	"time"
)

// InterceptRequest asks the daemon to bring requests of workloads to the laptop. The connection is made first where there is
// none.
type InterceptRequest struct {
	Connect   ConnectRequest `json:"connect"`
	Workloads []string       `json:"workloads"` // TYPE/NAME, of Connect.Namespace; an attached request may have none, and holds the connection
	Spec      InterceptSpec  `json:"spec"`
	// Attached ends the intercepts that the request began when the request ends: its maker stays for as long as they do.
	Attached bool `json:"attached,omitempty"`
}

// InterceptSpec is what an intercept takes and where that goes.
type InterceptSpec struct {
	Match     MatchSpec       `json:"match,omitzero"`
	Ports     []PortMap       `json:"ports,omitempty"`     // empty: all TCP and UDP ports of the container, each to the same port of the laptop
	Container string          `json:"container,omitempty"` // empty: the only one, or the one that kubectl would take
	Mode      string          `json:"mode,omitempty"`      // ModeAuto (also when empty), ModeEphemeral or ModeSidecar
	Mirror    bool            `json:"mirror,omitempty"`    // a copy goes to the laptop, whose answers nobody gets
	Flush     bool            `json:"flush,omitempty"`     // connections that are open already are ended
	TLS       *TLSTermination `json:"tls,omitempty"`
	Clone     *CloneSpec      `json:"clone,omitempty"` // requests go to a clone in the cluster, not to the laptop; Mirror is not for it
}

// MatchSpec says which HTTP requests are meant. The zero value means all of them, and whatever is not HTTP. All that it
// names have to match. A value that begins with "=~" is a regular expression (RE2) for all of the text, another one is meant
// as it is.
type MatchSpec struct {
	Headers []HeaderMatch `json:"headers,omitempty"`
	Path    string        `json:"path,omitempty"`    // "/api" means /api and what is below it; no query
	Methods []string      `json:"methods,omitempty"` // one of them
}

// HeaderMatch is one header. Names have no case.
type HeaderMatch struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// PortMap is one port of a pod and the port of the laptop that stands in for it.
type PortMap struct {
	Protocol  string `json:"protocol"`       // "tcp" or "udp"
	Container uint16 `json:"container"`      // where the application listens
	Name      string `json:"name,omitempty"` // of the port in the pod's template
	Local     uint16 `json:"local"`
}

// TLSTermination has the agent end TLS with the application's own key, and begin it again towards the application.
type TLSTermination struct {
	Certificate []byte `json:"certificate"` // PEM, a chain
	Key         []byte `json:"key"`         // PEM; it goes to the agent over the intercept's link, and to no disk
}

// How an agent gets into the pods.
const (
	ModeAuto      = "auto"      // ask only: ephemeral where it is admitted, else sidecar
	ModeEphemeral = "ephemeral" // an ephemeral container with NET_ADMIN; no restart
	ModeSidecar   = "sidecar"   // a container of the pod's template, without any capability; a rollout each way
)

// InterceptState is the state of an intercept.
//
//	starting ──▶ active ◀──▶ waiting        waiting: no pod, or none that is covered; why is in LastError
//	    │           │           │
//	    └───────▶ leaving ◀─────┘           failed: ended by itself; Error says why
type InterceptState string

const (
	InterceptStarting InterceptState = "starting"
	InterceptActive   InterceptState = "active"
	InterceptWaiting  InterceptState = "waiting"
	InterceptLeaving  InterceptState = "leaving"
	InterceptFailed   InterceptState = "failed"
)

// Intercept is one workload whose requests come to this laptop.
type Intercept struct {
	ID         string           `json:"id"`
	Connection string           `json:"connection"` // its ID
	Namespace  string           `json:"namespace"`
	Workload   string           `json:"workload"` // TYPE/NAME
	State      InterceptState   `json:"state"`
	Mode       string           `json:"mode"`
	ModeReason string           `json:"modeReason"`
	Match      string           `json:"match"` // for people; "everything"
	Mirror     bool             `json:"mirror,omitempty"`
	Ports      []PortMap        `json:"ports"`
	Pods       []InterceptedPod `json:"pods"`
	Owner      string           `json:"owner"`
	Since      time.Time        `json:"since"`
	Requests   uint64           `json:"requests"` // that came to the laptop: HTTP requests, other connections, UDP flows
	LastError  string           `json:"lastError,omitempty"`
	Checks     []Check          `json:"checks,omitempty"` // what the canary saw
	Warnings   []string         `json:"warnings,omitempty"`
	Error      *Error           `json:"error,omitempty"`
	Clone      *Clone           `json:"clone,omitempty"`  // where requests go, if not to the laptop
	Others     []Claim          `json:"others,omitempty"` // what other owners have of the same workload
}

// InterceptedPod is one pod of the workload.
type InterceptedPod struct {
	Name    string `json:"name"`
	Covered bool   `json:"covered"`
	Reason  string `json:"reason,omitempty"` // why it is not
}

// LeaveRequest ends intercepts.
type LeaveRequest struct {
	Namespace string   `json:"namespace,omitempty"` // empty: whichever it is
	Workloads []string `json:"workloads,omitempty"` // TYPE/NAME, or an intercept's ID
	All       bool     `json:"all,omitempty"`
}

// ResetRequest removes every intercept of workloads, whoever made it, and what was added for them.
type ResetRequest struct {
	Kubeconfig []byte   `json:"kubeconfig"` // as in ConnectRequest
	Namespace  string   `json:"namespace"`
	Workloads  []string `json:"workloads"` // TYPE/NAME
	Image      string   `json:"image"`     // of the traffic agent
	// Mine leaves what others have alone: only agents are removed that an earlier daemon of the same user on the same machine
	// left in a template, because it was killed.
	Mine bool `json:"mine,omitempty"`
}
