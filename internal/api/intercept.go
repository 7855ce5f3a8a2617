package api

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"time"

	"kubevpn/pkg/protocol/httpmatch"
)

// InterceptRequest asks the daemon to send requests of workloads to the laptop or to a clone. The daemon first connects
// if it has no connection to the cluster.
type InterceptRequest struct {
	Connect ConnectRequest `json:"connect"`
	// TYPE/NAME in Connect.Namespace; empty in an attached request that only holds the connection
	Workloads []string      `json:"workloads"`
	Spec      InterceptSpec `json:"spec"`
	// Attached means that the daemon ends the intercepts that the request began when the request ends.
	Attached bool `json:"attached,omitempty"`
}

// InterceptSpec describes which requests an intercept receives, and their target.
type InterceptSpec struct {
	Match httpmatch.Spec `json:"match,omitzero"`
	// empty: all TCP and UDP ports of the container, each to the same port of the laptop
	Ports []PortMap `json:"ports,omitempty"`
	// empty: the only container, or the default container of kubectl
	Container string `json:"container,omitempty"`
	Mode      string `json:"mode,omitempty"`   // ModeAuto (also when empty), ModeEphemeral or ModeSidecar
	Mirror    bool   `json:"mirror,omitempty"` // the laptop receives copies; its answers are discarded
	// with Mirror: the laptop receives nothing, and only records
	Observe bool `json:"observe,omitempty"`
	Flush   bool `json:"flush,omitempty"` // end the connections that are already open
	// programs of this machine reach the workload by the cluster, too
	NoShortcut bool            `json:"noShortcut,omitempty"`
	Cache      bool            `json:"cache,omitempty"` // answers keep their Cache-Control; or else it is no-store
	TLS        *TLSTermination `json:"tls,omitempty"`
	// how many of the last exchanges to keep
	Record int `json:"record,omitempty"`
	// send requests to a clone in the cluster, not to the laptop; not with Mirror
	Clone *CloneSpec `json:"clone,omitempty"`
}

// PortMap maps a port of a pod to a port of the laptop, or of a machine that the laptop reaches.
type PortMap struct {
	Protocol  string `json:"protocol"`       // "tcp" or "udp"
	Container uint16 `json:"container"`      // where the application listens
	Name      string `json:"name,omitempty"` // of the port in the pod's template
	Local     uint16 `json:"local"`
	// Host is the address or name of the machine that has Local, such as a container of the laptop; empty: the laptop.
	Host string `json:"host,omitempty"`
}

// Place returns HOST:LOCAL, with localhost for the laptop.
func (p PortMap) Place() string {
	return net.JoinHostPort(cmp.Or(p.Host, "localhost"), strconv.Itoa(int(p.Local)))
}

// Where describes the place for people: "port 8080 of this machine" or "172.17.0.5:8080".
func (p PortMap) Where() string {
	if p.Host == "" {
		return fmt.Sprintf("port %d of this machine", p.Local)
	}
	return p.Place()
}

// TLSTermination lets the agent terminate TLS with the key of the application, and use TLS towards the application.
type TLSTermination struct {
	Certificate []byte `json:"certificate"` // PEM, a chain
	Key         []byte `json:"key"`         // PEM; only sent to the agent, never stored on disk
}

// The modes in which an agent is added to pods.
const (
	ModeAuto      = "auto"      // in requests only: ephemeral if the cluster admits it, else sidecar
	ModeEphemeral = "ephemeral" // an ephemeral container with NET_ADMIN; no restart
	// a container in the pod template, without capabilities; adding and removing it are rollouts
	ModeSidecar = "sidecar"
)

// InterceptState is the state of an intercept.
//
//	starting ──▶ active ◀──▶ waiting        waiting: no pod, or none is intercepted; LastError says why
//	    │           │           │
//	    └───────▶ leaving ◀─────┘           failed: ended by itself; see Error
type InterceptState string

const (
	InterceptStarting InterceptState = "starting"
	InterceptActive   InterceptState = "active"
	InterceptWaiting  InterceptState = "waiting"
	InterceptLeaving  InterceptState = "leaving"
	InterceptFailed   InterceptState = "failed"
)

// Intercept is one workload whose requests go to this laptop or to a clone.
type Intercept struct {
	TypeMeta
	ID         string         `json:"id"`
	Connection string         `json:"connection"` // its ID
	Namespace  string         `json:"namespace"`
	Workload   string         `json:"workload"` // TYPE/NAME
	State      InterceptState `json:"state"`
	Mode       string         `json:"mode"`
	ModeReason string         `json:"modeReason"`
	Match      string         `json:"match"` // for people; "everything"
	// AddHeaders make a browser's requests match (ConnectRequest); empty: headers cannot.
	AddHeaders []httpmatch.Named `json:"addHeaders,omitempty"`
	Mirror     bool              `json:"mirror,omitempty"`
	Ports      []PortMap         `json:"ports"`
	Pods       []InterceptedPod  `json:"pods"`
	Owner      string            `json:"owner"`
	Since      time.Time         `json:"since"`
	Requests   uint64            `json:"requests"` // number of HTTP requests, other connections and UDP flows
	LastError  string            `json:"lastError,omitempty"`
	Checks     []Check           `json:"checks,omitempty"` // the results of the probe
	Warnings   []string          `json:"warnings,omitempty"`
	Error      *Error            `json:"error,omitempty"`
	Clone      *Clone            `json:"clone,omitempty"`   // the target, if it is not the laptop
	Exposed    string            `json:"exposed,omitempty"` // the host name of a Service that `expose` made
	Others     []Claim           `json:"others,omitempty"`  // intercepts of other owners on the same workload
}

// InterceptedPod is one pod of the workload.
type InterceptedPod struct {
	Name        string `json:"name"`
	Intercepted bool   `json:"intercepted"`
	Reason      string `json:"reason,omitempty"` // why the pod is not intercepted
}

// LeaveRequest ends intercepts.
type LeaveRequest struct {
	Connection string   `json:"connection,omitempty"` // ID of a connection; empty: any
	Namespace  string   `json:"namespace,omitempty"`  // empty: any
	Workloads  []string `json:"workloads,omitempty"`  // TYPE/NAME, or an intercept's ID
	All        bool     `json:"all,omitempty"`
}

// ResetRequest removes the intercepts of all owners from workloads, and the agents in their pods.
type ResetRequest struct {
	Namespace string   `json:"namespace"`
	Workloads []string `json:"workloads"` // TYPE/NAME
	// of the traffic agent; empty: that of the traffic manager, which the user must trust
	Image string `json:"image"`
	// ManagerNamespace is the namespace of the traffic manager, as in ConnectRequest.
	ManagerNamespace string  `json:"managerNamespace,omitempty"`
	Consent          Consent `json:"consent,omitzero"`
	// Mine limits Reset to agents that killed daemons of the same user on the same machine left in a template.
	Mine bool `json:"mine,omitempty"`
}
