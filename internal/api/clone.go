package api

import "time"

// A clone that receives files runs `traffic supervise` of the traffic manager's image as the first process of its
// container.
const (
	SupervisorVolume  = "/.kubevpn" // mount path; no other container mounts the volume
	SupervisorProgram = SupervisorVolume + "/traffic"
	SupervisorSocket  = SupervisorVolume + "/socket"
)

// CloneSpec describes how a clone differs from its workload. InterceptSpec selects its requests.
type CloneSpec struct {
	// empty: formed from the names of the workload and the owner
	Name      string `json:"name,omitempty"`
	Namespace string `json:"targetNamespace,omitempty"` // empty: the namespace of the workload
	// the container that Image, Env, Command and Sync change; empty: as in InterceptSpec
	Container string   `json:"container,omitempty"`
	Image     string   `json:"image,omitempty"`
	Env       []string `json:"env,omitempty"` // NAME=VALUE
	Command   []string `json:"command,omitempty"`
	Replicas  int32    `json:"replicas,omitempty"` // 0: 1
	// volume name to VolumeEmpty, or to VolumeShare for a volume that would otherwise be empty
	Volumes   map[string]string `json:"volumes,omitempty"`
	NoTraffic bool              `json:"noTraffic,omitempty"` // the clone receives no requests
	// Expose means that there is no workload: a Service of that Name sends requests to this laptop.
	Expose  bool       `json:"expose,omitempty"`
	Host    string     `json:"host,omitempty"` // with Expose: for requests from outside of the cluster; empty: none
	Sync    []SyncPair `json:"sync,omitempty"`
	Restart bool       `json:"restartOnSync,omitempty"`
	// SyncShared allows Sync to write to volumes to which the workload or other pods also write.
	SyncShared bool `json:"syncShared,omitempty"`
	// InsecureRegistries are registry hosts with ports that kubevpn may query over HTTP for the command of an image. It
	// sends them no credentials.
	InsecureRegistries []string `json:"insecureRegistries,omitempty"`
}

// The values of CloneSpec.Volumes.
const (
	VolumeEmpty = "empty" // an empty directory
	VolumeShare = "share" // the volume itself, on the node of the pod that uses it
)

// SyncPair is a directory or file of the laptop and its copy in the clone's container.
type SyncPair struct {
	Local  string `json:"local"`
	Remote string `json:"remote"` // absolute
}

// CloneState is the state of a clone.
//
//	starting ──▶ running ◀──▶ waiting       waiting: no pod is ready; see LastError
//	    │           │            │          done: its command completed, like that of a CronJob
//	    │           ├───▶ done   │          failed: ended by itself; see Error
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
	Namespace string     `json:"namespace"` // of the clone
	Name      string     `json:"name"`      // of its Job
	State     CloneState `json:"state"`
	Pods      []ClonePod `json:"pods"`
	LastError string     `json:"lastError,omitempty"`
	Notes     []string   `json:"notes,omitempty"` // differences from the workload that nobody requested
	// a name that resolves to its pods, independent of the match; empty: none
	Host      string      `json:"host,omitempty"`
	Ports     []ClonePort `json:"ports,omitempty"` // of that name
	NoTraffic bool        `json:"noTraffic,omitempty"`
	Sync      []Synced    `json:"sync,omitempty"`
}

// ClonePort maps a port of Clone.Host to a port of the clone's pods.
type ClonePort struct {
	Protocol string `json:"protocol"` // "tcp" or "udp"
	Port     uint16 `json:"port"`
	Target   uint16 `json:"target"`
}

// ClonePod is one pod of a clone.
type ClonePod struct {
	Name   string `json:"name"`
	IP     string `json:"ip,omitempty"`
	Ready  bool   `json:"ready"`            // ready in Kubernetes, and has all files: it receives requests
	Reason string `json:"reason,omitempty"` // why not
}

// Synced is the state of a SyncPair.
type Synced struct {
	SyncPair
	Synced    bool      `json:"synced"` // the copy is up to date
	Files     int       `json:"files"`  // number of files in the copy
	Last      time.Time `json:"last,omitzero"`
	LastError string    `json:"lastError,omitempty"`
}
