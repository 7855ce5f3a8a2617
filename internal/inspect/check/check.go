// Package check runs checks and records their findings: the checks of a machine and a cluster for `kubevpn doctor`,
// those of a request for `kubevpn why`.
package check

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"kubevpn/internal/api"
)

const (
	// Timeout limits a check, without the time for the check that it needs. Checks with a timeout of their own end
	// earlier.
	Timeout = 20 * time.Second
	// abandonTimeout is the time after its end in which a check must return.
	abandonTimeout = 2 * time.Second

	// Bounds of a finding, most of which may be text of the cluster.
	maxText  = 400 // characters of a line
	maxNotes = 16
)

// Check is one check. Do returns a finding without the fields that Run knows: section, name and, if it is 0, the time.
type Check[F any] struct {
	Section, Name string
	Needs         string // the name of an earlier check; this one is skipped unless that is ok or a warning
	Do            func(context.Context, F) api.Finding
}

// New returns a Check.
func New[F any](section, name, needs string, do func(context.Context, F) api.Finding) Check[F] {
	return Check[F]{Section: section, Name: name, Needs: needs, Do: do}
}

// ended is a check that runs or has ended.
type ended struct {
	done chan struct{} // closed when the Finding is set
	api.Finding
}

// Run runs the checks at once, and reports their findings in the order of the list: to found, unless it is nil, and as
// the result. It returns when all have ended, which takes a bounded time. If ctx ends before, the checks that have not
// ended are skipped.
func Run[F any](ctx context.Context, facts F, list []Check[F], found func(api.Finding)) (findings []api.Finding) {
	all := make(map[string]*ended, len(list))
	for _, c := range list {
		all[c.Name] = &ended{done: make(chan struct{})}
	}
	for _, c := range list {
		go func() {
			e := all[c.Name]
			defer close(e.done)
			e.Finding = c.find(ctx, facts, all[c.Needs])
			e.Section, e.Name = c.Section, c.Name
		}()
	}
	for _, c := range list {
		e := all[c.Name]
		<-e.done
		findings = append(findings, e.Finding)
		if found != nil {
			found(e.Finding)
		}
	}
	return findings
}

// find runs a check after the one that it needs, if any, has succeeded. It leaves behind a check that does not return
// within its timeout, or when ctx ends.
func (c Check[F]) find(ctx context.Context, facts F, needed *ended) (found api.Finding) {
	if needed != nil {
		<-needed.done
		switch needed.Verdict {
		case api.VerdictFailed:
			return Skipped("the check %q failed", c.Needs)
		case api.VerdictSkipped:
			return Skipped("%s", needed.Seen)
		}
	}
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	result := make(chan api.Finding, 1)
	go func() { result <- c.Do(bounded, facts) }()
	select {
	case found = <-result:
	case <-ctx.Done():
	case <-time.After(Timeout + abandonTimeout):
		found = Failed(api.ExitUnexpected, "the check did not end within %v", Timeout).WithFix("kubevpn doctor -v 6")
		found.Effect = "what it checks is unknown"
	}
	if ctx.Err() != nil {
		found = Skipped("interrupted")
	}
	found.Seconds = cmp.Or(found.Seconds, time.Since(began).Seconds())
	return clean(found)
}

// clean bounds the texts of a finding, and makes them safe to print.
func clean(f api.Finding) api.Finding {
	f.Seen, f.Cause, f.Effect, f.Fix = line(f.Seen), line(f.Cause), line(f.Effect), api.Clean(f.Fix)
	left := len(f.Notes) - maxNotes
	f.Notes = api.Texts(f.Notes[:min(len(f.Notes), maxNotes)], line)
	if left > 0 {
		f.Notes = append(f.Notes, fmt.Sprintf("and %d more", left))
	}
	return f
}

func line(s string) string {
	r := []rune(api.CleanLine(s))
	if len(r) > maxText {
		return string(r[:maxText]) + "..."
	}
	return string(r)
}

// OK returns a finding about something that works.
func OK(format string, args ...any) api.Finding {
	return api.Finding{Verdict: api.VerdictOK, Seen: fmt.Sprintf(format, args...)}
}

// Skipped returns the finding of a check that could not be made.
func Skipped(format string, args ...any) api.Finding {
	return api.Finding{Verdict: api.VerdictSkipped, Seen: fmt.Sprintf(format, args...)}
}

// Warning returns a finding about something that works less well, or is unusual.
func Warning(format string, args ...any) api.Finding {
	return api.Finding{Verdict: api.VerdictWarning, Cause: fmt.Sprintf(format, args...)}
}

// Failed returns a finding about something that does not work.
func Failed(code api.ExitCode, format string, args ...any) api.Finding {
	return api.Finding{Verdict: api.VerdictFailed, Code: code, Cause: fmt.Sprintf(format, args...)}
}
