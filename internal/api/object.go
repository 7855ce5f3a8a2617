package api

// ObjectVersion is the apiVersion of the objects that commands print with -o. Within a version, fields are only added.
const ObjectVersion = "kubevpn.dev/v1"

// TypeMeta names the kind of an object that a command prints. It is empty inside another object and between processes.
type TypeMeta struct {
	Kind       string `json:"kind,omitempty"`
	APIVersion string `json:"apiVersion,omitempty"`
}

// Type returns the TypeMeta of a kind.
func Type(kind string) TypeMeta { return TypeMeta{Kind: kind, APIVersion: ObjectVersion} }

// The kinds of objects. KindEvent is a line of a command that shows its steps.
const (
	KindStatus          = "Status"
	KindEvent           = "Event"
	KindConnection      = "Connection"
	KindIntercept       = "Intercept"
	KindInterceptList   = "InterceptList"
	KindVersion         = "Version"
	KindWorkloadList    = "WorkloadList"
	KindTrustedClusters = "TrustedClusters"
	KindSettingList     = "SettingList"
	KindHelperService   = "HelperService"
	KindReport          = "Report"
	KindFlowList        = "FlowList"
	KindDiagnosis       = "Diagnosis"
	KindRecord          = "Record"
	KindDNSQueryList    = "DNSQueryList"
	KindDNSQuery        = "DNSQuery"
	KindPage            = "Page"
	KindDiff            = "Diff"
)

// InterceptList is the result of `kubevpn proxy` and `kubevpn clone` for several workloads.
type InterceptList struct {
	TypeMeta
	Items []Intercept `json:"items"`
}

// Version is the output of `kubevpn version`.
type Version struct {
	TypeMeta
	Version  string  `json:"version"`
	Commit   string  `json:"commit"`
	Go       string  `json:"go"`
	Platform string  `json:"platform"`
	Image    string  `json:"image"`             // the default image of the traffic manager
	Daemon   *string `json:"daemon"`            // null: no daemon is running
	Service  string  `json:"service,omitempty"` // the version of the root helper's service; empty: it is not installed
}

// WorkloadList is the output of `kubevpn list`.
type WorkloadList struct {
	TypeMeta
	Items    []Workload `json:"items"`
	Warnings []string   `json:"warnings,omitempty"` // what the list lacks, and why
}

// Workload is an object with pods, as `kubevpn list` shows it.
type Workload struct {
	Namespace string         `json:"namespace"`
	Workload  string         `json:"workload"`         // TYPE/NAME
	Modes     []string       `json:"modes"`            // in which an agent can be added; empty: see Reason
	Reason    string         `json:"reason,omitempty"` // why a mode is missing
	Ports     []WorkloadPort `json:"ports"`            // that can be intercepted
	Pods      int            `json:"pods"`             // that have not ended
	// Intercepts have an agent in the pods, of any owner. An agent runs for a minute after the end of its intercept.
	Intercepts []Holder `json:"intercepts"`
	Clones     []Holder `json:"clones"` // of any owner
}

// WorkloadPort is a port of the workload's pods.
type WorkloadPort struct {
	Protocol  string   `json:"protocol"` // "tcp" or "udp"
	Port      uint16   `json:"port"`
	Name      string   `json:"name,omitempty"`      // of the container's port
	Container string   `json:"container,omitempty"` // declares it
	Services  []string `json:"services,omitempty"`  // send to it: NAME:PORT
}

// Holder is an owner who intercepts or clones a workload.
type Holder struct {
	Owner     string `json:"owner"`               // user@host
	Mode      string `json:"mode,omitempty"`      // of the agents of an intercept
	Pods      int    `json:"pods,omitempty"`      // with an agent of an intercept
	Match     string `json:"match,omitempty"`     // for people; known if this machine also intercepts the workload
	Name      string `json:"name,omitempty"`      // of a clone
	Namespace string `json:"namespace,omitempty"` // of a clone
}

// Report is the output of `kubevpn report`.
type Report struct {
	TypeMeta
	File  string       `json:"file"` // the archive
	Parts []ReportPart `json:"parts"`
}

// ReportPart is one file in the archive, or one that is missing.
type ReportPart struct {
	Name    string `json:"name"`
	About   string `json:"about"`
	Bytes   int    `json:"bytes"`             // 0: the archive does not contain it
	Missing string `json:"missing,omitempty"` // why the part, or something of it, is missing
}
