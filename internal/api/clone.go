package api

import "time"

// A clone to which files go runs the traffic manager's program as its container's first process: `traffic supervise`.
const (
	SupervisorVolume  = "/.kubevpn" // where it is mounted, in that container alone
	SupervisorProgram = SupervisorVolume + "/traffic"
	SupervisorSocket  = SupervisorVolume + "/socket"
)

// CloneSpec is how a clone differs from its workload. Which requests go to it is InterceptSpec's.
type CloneSpec struct {
	Name      string            `json:"name,omitempty"`            // empty: the workload's and the owner's
	Namespace string            `json:"targetNamespace,omitempty"` // empty: the workload's
	Container string            `json:"container,omitempty"`       // which one Image, Env, Command and Sync mean; empty: as for InterceptSpec
	Image     string            `json:"image,omitempty"`
	Env       []string          `json:"env,omitempty"` // NAME=VALUE
	Command   []string          `json:"command,omitempty"`
	Replicas  int32             `json:"replicas,omitempty"`  // 0: 1
	Volumes   map[string]string `json:"volumes,omitempty"`   // of those that cannot be shared: VolumeEmpty (also when not named) or VolumeShare
	NoTraffic bool              `json:"noTraffic,omitempty"` // nothing goes to it
	Sync      []SyncPair        `json:"sync,omitempty"`
	Restart   bool              `json:"restartOnSync,omitempty"`
}

// What a clone has of a volume that only one pod, or one node, can have.
const (
	VolumeEmpty = "empty" // an empty directory of its own
	VolumeShare = "share" // the same, on the node of the pod that has it
)

// SyncPair is a directory, or a file, of the laptop that goes to one of the clone's container.
type SyncPair struct {
	Local  string `json:"local"`
	Remote string `json:"remote"` // absolute
}

// CloneState is the state of a clone.
//
//	starting ──▶ running ◀──▶ waiting       waiting: none of its pods is ready; why is in LastError
//	    │           │            │          done: what it runs came to its end, as a CronJob's pods do
//	    │           ├───▶ done   │          failed: ended by itself; Error says why
//	    │           │       │    │
//	    └───────▶ leaving ◀─┴────┘
type CloneState string

const (
	CloneStarting CloneState = "starting"
	CloneRunning  CloneState = "running"
	CloneWaiting  CloneState = "waiting"
	CloneDone     CloneState = "done"
	CloneLeaving  CloneState = "leaving"
	CloneFailed   CloneState = "failed"
)

// Clone is one copy of a workload.
type Clone struct {
	Namespace string      `json:"namespace"` // the clone's
	Name      string      `json:"name"`      // of its Job
	State     CloneState  `json:"state"`
	Pods      []ClonePod  `json:"pods"`
	LastError string      `json:"lastError,omitempty"`
	Notes     []string    `json:"notes,omitempty"` // in what it differs, and was not asked to
	Host      string      `json:"host,omitempty"`  // the name by which it is reached, whichever requests go to it; empty: it has none
	Ports     []ClonePort `json:"ports,omitempty"` // of that name
	NoTraffic bool        `json:"noTraffic,omitempty"`
	Sync      []Synced    `json:"sync,omitempty"`
}

// ClonePort is a port of a clone's name, and the one of its pods that it leads to.
type ClonePort struct {
	Protocol string `json:"protocol"` // "tcp" or "udp"
	Port     uint16 `json:"port"`
	Target   uint16 `json:"target"`
}

// ClonePod is one pod of a clone.
type ClonePod struct {
	Name   string `json:"name"`
	IP     string `json:"ip,omitempty"`
	Ready  bool   `json:"ready"`            // as Kubernetes has it, and with the files that go to it: it gets requests
	Reason string `json:"reason,omitempty"` // why it is not
}

// Synced is what became of a SyncPair.
type Synced struct {
	SyncPair
	Synced    bool      `json:"synced"` // the container has what the laptop has
	Files     int       `json:"files"`  // that are kept in sync
	Last      time.Time `json:"last,omitzero"`
	LastError string    `json:"lastError,omitempty"`
}
