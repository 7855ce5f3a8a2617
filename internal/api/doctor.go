package api

import "net/netip"

// FindingState is the result of one check of `kubevpn doctor`.
type FindingState string

const (
	FindingOK      FindingState = "ok"
	FindingWarning FindingState = "warning" // something works less well, or will fail later
	FindingFailed  FindingState = "failed"  // `kubevpn connect`, or what the check names, does not work
	FindingSkipped FindingState = "skipped" // nothing is known: Seen says why
)

// Finding is the result of one check. A warning and a failed one have a Cause, an Effect and a Fix.
type Finding struct {
	Section string       `json:"section"`
	Name    string       `json:"name"` // unique in a Diagnosis
	State   FindingState `json:"state"`
	Seen    string       `json:"seen,omitempty"` // what an ok check found, or why a check was skipped
	Cause   string       `json:"cause,omitempty"`
	Effect  string       `json:"effect,omitempty"`
	Fix     string       `json:"fix,omitempty"`  // the command that fixes it; may have several lines
	Code    ExitCode     `json:"code,omitempty"` // of a failed check: the exit code of `kubevpn doctor`
	Seconds float64      `json:"seconds"`        // that the check took
}

// Right says what the user may do in the cluster.
type Right struct {
	Gives   string   `json:"gives"` // what these rights allow
	Needs   []string `json:"needs"` // "create pods/portforward in namespace kubevpn"
	Allowed bool     `json:"allowed"`
	Missing []string `json:"missing,omitempty"` // those of Needs that the user does not have
}

// Diagnosis is the output of `kubevpn doctor`.
type Diagnosis struct {
	TypeMeta
	Findings []Finding `json:"findings"`
	Rights   []Right   `json:"rights"` // empty if the API server was not reached
}

// Failed returns the first check that failed, or nil.
func (d *Diagnosis) Failed() *Finding {
	return Find(d.Findings, func(f Finding) bool { return f.State == FindingFailed })
}

// Foresight is what the routes of a connection would be.
type Foresight struct {
	Routes   []netip.Prefix
	Overlap  *Error // with which `kubevpn connect` would fail; nil: it would not overlap a network of this machine
	Warnings []string
}
