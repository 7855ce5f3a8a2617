package api

import (
	"fmt"
	"net/netip"
	"slices"

	"kubevpn/pkg/datapath/packet"
)

// Verdict is the result of one check.
type Verdict string

const (
	VerdictOK      Verdict = "ok"
	VerdictWarning Verdict = "warning" // unusual, works less well, will fail later, or follows from a failed check
	VerdictFailed  Verdict = "failed"  // `kubevpn connect`, the request, or what the check names, does not work
	VerdictSkipped Verdict = "skipped" // nothing is known, or there is nothing to check: Seen says why
)

// Finding is the result of one check. A failed one has a Code. In `kubevpn doctor`, a warning and a failed one have a
// Cause, an Effect and a Fix.
type Finding struct {
	Section string   `json:"section"`
	Name    string   `json:"name"` // unique in a Diagnosis
	Verdict Verdict  `json:"verdict"`
	Seen    string   `json:"seen,omitempty"`  // what an ok check found, or why a check was skipped
	Cause   string   `json:"cause,omitempty"` // of a warning or a failed check
	Notes   []string `json:"notes,omitempty"` // further observations, each on one line
	Effect  string   `json:"effect,omitempty"`
	Fix     string   `json:"fix,omitempty"`  // what to do, usually a command; may have several lines
	Code    ExitCode `json:"code,omitempty"` // of a failed check: the exit code of the command
	Seconds float64  `json:"seconds"`        // that the check took
}

// WithNotes returns a copy of f with more notes.
func (f Finding) WithNotes(notes ...string) Finding {
	f.Notes = slices.Concat(f.Notes, notes)
	return f
}

// WithFix returns a copy of f with the fix set.
func (f Finding) WithFix(format string, args ...any) Finding {
	f.Fix = fmt.Sprintf(format, args...)
	return f
}

// AsWarning returns a copy of a failed finding that is not the cause.
func (f Finding) AsWarning() Finding {
	f.Verdict, f.Code, f.Fix = VerdictWarning, ExitOK, ""
	return f
}

// Diagnosis is the output of `kubevpn doctor` and `kubevpn why`.
type Diagnosis struct {
	TypeMeta
	Findings []Finding `json:"findings"`
	Trace    string    `json:"traceID,omitempty"` // of the header traceparent that `kubevpn why` sent
	Status   int       `json:"status,omitempty"`  // of the answer to the request of `kubevpn why`
}

// Failed returns the first check that failed, which names the exit code, or nil.
func (d *Diagnosis) Failed() *Finding {
	return Find(d.Findings, func(f Finding) bool { return f.Verdict == VerdictFailed })
}

// Foresight is what the routes of a connection would be.
type Foresight struct {
	Routes   []netip.Prefix
	Mappings packet.Mappings // of parts of Routes
	Overlap  *Error          // with which `kubevpn connect` would fail; nil: no network of this machine overlaps
	Warnings []string
}
