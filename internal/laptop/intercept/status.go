package intercept

import (
	"cmp"
	"slices"

	"kubevpn/internal/api"
)

// Status returns a snapshot of the intercept, also after Run has returned.
func (i *Intercept) Status() api.Intercept {
	i.mu.Lock()
	defer i.mu.Unlock()
	s := i.status
	s.Ports, s.Checks, s.Warnings = slices.Clone(s.Ports), slices.Clone(s.Checks), slices.Clone(s.Warnings)
	s.Warnings = append(s.Warnings, i.now.changes...)
	s.Pods = []api.InterceptedPod{}
	s.Requests = i.past + i.short.Requests()
	intercepted := 0
	others := make(map[[2]string]int) // indices in s.Others, by owner and ID
	for _, c := range i.sorted() {
		s.Pods = append(s.Pods, api.InterceptedPod{Name: c.name, Intercepted: c.active(), Reason: c.reason()})
		s.Requests += c.requests.total()
		if c.active() {
			intercepted++
		} else if s.Error == nil && c.reason() != "" {
			s.LastError = c.name + ": " + c.reason()
		}
		if mine := ownClaim(c.linked.state, i.claim.ID); mine != nil {
			if mine.LastError != "" {
				s.LastError = mine.LastError
			}
			for _, note := range mine.Notes {
				if !slices.Contains(s.Warnings, note) {
					s.Warnings = append(s.Warnings, note)
				}
			}
		}
		if c.linked.state == nil {
			continue
		}
		for _, claim := range c.linked.state.Claims {
			if claim.Mine {
				continue
			}
			key := [2]string{claim.Owner, claim.ID}
			if n, known := others[key]; known {
				s.Others[n].Requests += claim.Requests
			} else {
				others[key] = len(s.Others)
				s.Others = append(s.Others, claim)
			}
		}
	}
	switch {
	case s.State != api.InterceptActive:
	case intercepted == 0 || i.now.cut != "":
		s.State = api.InterceptWaiting
		if len(s.Pods) == 0 {
			s.LastError = s.Workload + " has no pods"
		}
		s.LastError = cmp.Or(i.now.cut, s.LastError)
	}
	return s
}
