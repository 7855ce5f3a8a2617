package why

import (
	"cmp"
	"fmt"
	"iter"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/protocol/httpmatch"
)

// landing is where an agent saw the request, or where it took a shortcut.
type landing struct {
	intercept *api.InterceptTrace
	pod       string // empty: the request did not leave this machine
	request   *api.TracedRequest
	to        *api.TracedClaim // nil: the application
}

// mine reports whether this machine got the request.
func (l *landing) mine() bool { return l.to != nil && l.to.Mine }

// landings yields where agents saw the request, and those that programs made of it.
func (j *facts) landings() iter.Seq[*landing] {
	return func(yield func(*landing) bool) {
		for n := range j.Traces {
			for _, p := range j.Traces[n].Pods {
				for _, r := range cmp.Or(p.Trace, new(api.AgentTrace)).Requests {
					l := &landing{intercept: &j.Traces[n], pod: p.Pod, request: &r}
					if r.To >= 0 && r.To < len(r.Claims) {
						l.to = &r.Claims[r.To]
					}
					if !yield(l) {
						return
					}
				}
			}
		}
	}
}

// land returns where an agent saw the request. It prefers an agent that sent it to this machine.
func (j *facts) land() (best *landing) {
	for n := range j.Traces {
		i := &j.Traces[n]
		if port := i.Shortcuts[j.Trip.To]; port > 0 && j.Pod == nil && wanted(i, j.Request) {
			return &landing{intercept: i, request: &api.TracedRequest{Port: port}, to: &api.TracedClaim{Mine: true}}
		}
	}
	for l := range j.landings() {
		if best == nil || l.mine() && !best.mine() {
			best = l
		}
	}
	return best
}

// wanted reports whether the request, as it was sent, matches an intercept.
func (j *judge) wanted(i *api.InterceptTrace) bool { return wanted(i, j.Request) }

func wanted(i *api.InterceptTrace, r *http.Request) bool {
	m, err := httpmatch.New(i.Match)
	return err == nil && !i.Mirror && len(m.Differences(r)) == 0
}

func (j *judge) agent() api.Finding {
	l := j.landed
	switch {
	case j.Missing[objectAgents] != "":
		return check.Skipped("%s", j.Missing[objectAgents])
	case len(j.Traces) == 0:
		return check.Skipped("this machine has no intercept").WithNotes(j.others()...)
	case l == nil:
		return j.unseen()
	case j.lostAt() != nil:
		return j.lost(j.lostAt())
	case l.mine() && l.pod == "":
		return check.OK("it stays on this machine, which intercepts %s (a shortcut; not with `proxy --no-shortcut`)",
			l.intercept.Workload)
	case l.mine():
		target := "this machine"
		if l.intercept.Clone {
			target = "your clone"
		}
		return check.OK("the agent of pod %s sends it to %s: %s", l.pod, target, l.to.Match)
	case l.to != nil:
		return check.Failed(api.ExitOtherMatch, "the agent of pod %s sends it to %s, whose match is %s", l.pod,
			l.to.Owner, l.to.Match).WithNotes(tried(l.request)...).
			WithFix("Send other headers, or ask %s to run `kubevpn leave`.", api.Clean(l.to.Owner))
	case j.wanted(l.intercept):
		return j.lost(l)
	}
	return check.OK("the agent of pod %s sends it to the application", l.pod).WithNotes(tried(l.request)...)
}

// tried describes the claims that an agent tried.
func tried(r *api.TracedRequest) (notes []string) {
	for _, c := range r.Claims {
		who := c.Owner
		if c.Mine {
			who = "your match"
		}
		text := cmp.Or(api.Some(c.Differences, maxDifferences), "it matches")
		if c.Away {
			text += ", and its owner does not answer"
		}
		notes = append(notes, fmt.Sprintf("%s, %s: %s", who, c.Match, text))
	}
	return notes
}

// lost is the finding for a request that should match and went to the application.
func (j *judge) lost(l *landing) api.Finding {
	for _, c := range l.request.Claims {
		switch {
		case !c.Mine:
		case len(c.Differences) > 0:
			return check.Failed(api.ExitHeaderLost, "it reached the agent of pod %s changed: %v", l.pod,
				c.Differences[0]).
				WithNotes(append(j.had(l, c.Match), tried(l.request)...)...).
				WithFix("You sent what the match needs. A program or proxy before this pod removes or changes it: " +
					"let it\npropagate the header, as it does with tracing headers. `kubevpn requests TYPE/NAME` of " +
					"a workload on the way\nshows whether it still gets the header.")
		case c.Away:
			return check.Warning("the agent of pod %s does not reach this machine", l.pod).
				WithNotes(tried(l.request)...)
		}
	}
	return check.OK("the agent of pod %s sends it to the application: port %d is not intercepted", l.pod,
		l.request.Port)
}

// lostAt returns where the application got a request that lacked only headers of the match of this machine's intercept,
// although it was sent with them. It may be one that a program made of the first.
func (j *judge) lostAt() *landing {
	for l := range j.landings() {
		if l.to == nil && j.wanted(l.intercept) && slices.ContainsFunc(l.request.Claims, func(c api.TracedClaim) bool {
			return c.Mine && len(c.Differences) > 0 && !slices.ContainsFunc(c.Differences, isOwn)
		}) {
			return l
		}
	}
	return nil
}

// isOwn reports whether a request that a program makes of another has its own value of what differs.
func isOwn(d httpmatch.Difference) bool {
	return !strings.HasPrefix(d.Part, "header ") && !strings.HasPrefix(d.Part, "baggage ")
}

// had names the hops that got a request with what a match needs, of those that have an agent of this machine. One of
// them, or something behind it, sent the request on without.
func (j *judge) had(lost *landing, match string) (notes []string) {
	for l := range j.landings() {
		if l.pod == lost.pod || !slices.Contains(l.request.Fits, match) {
			continue
		}
		to := "the application"
		if l.mine() {
			to = "this machine"
		} else if l.to != nil {
			to = l.to.Owner
		}
		notes = append(notes, fmt.Sprintf("pod %s of %s had it with %s, and gave it to %s: that program, or one after "+
			"it, sent it on without", l.pod, l.intercept.Workload, match, to))
	}
	return notes
}

// unseen is the finding for a request that no agent saw.
func (j *judge) unseen() api.Finding {
	if !j.Trip.Dial.Done {
		return check.Skipped("no connection")
	}
	var changes []string
	for n := range j.Traces {
		i := &j.Traces[n]
		if !j.wanted(i) {
			continue
		}
		changes = append(changes, i.Changes...)
		if f := j.unseenAt(i); f.Verdict != "" {
			return f.WithNotes(changes...)
		}
		if client, pod := j.older(i); client.IsValid() {
			return check.Failed(api.ExitOldConnection, "no agent of %s saw it, and pod %s has a connection from %v "+
				"that is older than the intercept", i.Workload, pod, client.Addr()).
				WithFix("`kubevpn proxy %s --flush` closes such connections, so that their clients connect again.",
					api.ShellQuote(i.Workload))
		}
	}
	return check.Skipped("no agent of your intercepts saw it").WithNotes(append(changes, j.others()...)...)
}

// unseenAt is unseen for an intercept. It returns no finding if the request was not for its pods.
func (j *judge) unseenAt(i *api.InterceptTrace) api.Finding {
	var without, silent []string
	mesh, inMesh, direct := "", "", false
	for _, e := range j.ready {
		p := api.Find(i.Pods, func(p api.PodTrace) bool { return p.Pod == e.name })
		direct = direct || p != nil
		switch {
		case p == nil:
			without = append(without, fmt.Sprintf("%v is not one of its pods", e))
		case p.Error != "":
			silent = append(silent, fmt.Sprintf("pod %s: %s", e.name, p.Error))
		case p.Trace == nil:
			without = append(without, fmt.Sprintf("pod %s: %s", e.name, p.Reason))
		case e.pod != nil && mesh == "":
			mesh, _ = meshOf(e.pod)
			inMesh = e.name
		}
	}
	switch {
	case !direct || i.Namespace != j.Namespace:
		return api.Finding{}
	case mesh != "":
		return check.Failed(api.ExitMesh, "%s takes it before the agent of pod %s", mesh, inMesh).
			WithFix("`kubevpn proxy --mode sidecar` receives requests to Services after the mesh.")
	case len(silent) > 0:
		return check.Skipped("an agent did not tell what it saw: %s", silent[0]).WithNotes(silent[1:]...)
	case len(without) > 0:
		return check.Failed(api.ExitNoAgent, "it went to a pod without your agent, which intercepts %s: %s", i.Workload,
			without[0]).
			WithNotes(without[1:]...).
			WithFix("`kubevpn status` shows the pods of the intercept; `kubevpn proxy` again adds agents.")
	case j.Request.URL.Scheme == "https":
		return check.Warning("the agent cannot read it: TLS hides it; `kubevpn proxy --tls-secret` ends TLS there")
	case j.Pod != nil && j.Trip.TakenAt.IsValid():
		return check.Failed(api.ExitMesh, "the agents of %s did not see it: port %d of pod %s, which sent it, takes "+
			"it before them", i.Workload, j.Trip.TakenAt.Port(), j.Source.Name).
			WithFix("The service mesh of that pod decides where the request goes.")
	}
	return check.Warning("the agents of %s did not see it: something takes it before them", i.Workload)
}

// older returns a connection that is older than an agent of the intercept, which therefore does not see its requests.
// Its client is a pod that the request was for.
func (j *judge) older(i *api.InterceptTrace) (client netip.AddrPort, pod string) {
	for _, p := range i.Pods {
		for _, c := range cmp.Or(p.Trace, new(api.AgentTrace)).Older {
			if slices.ContainsFunc(j.all, func(e endpoint) bool { return e.to.Addr() == c.Addr().Unmap() }) {
				return c, p.Pod
			}
		}
	}
	return netip.AddrPort{}, ""
}

// others names the owners of the agents in the pods that the request is for.
func (j *judge) others() (notes []string) {
	for _, e := range j.all {
		for _, h := range workloads.Holders(cmp.Or(e.pod, new(corev1.Pod))) {
			notes = append(notes, fmt.Sprintf("pod %s has an agent of %s, whose match only they see", e.name, h.Owner))
		}
	}
	return notes
}

// program judges the program of this machine.
func (j *judge) program() api.Finding {
	l := j.landed
	if l == nil || !l.mine() || l.intercept.Clone {
		return check.Skipped("the request is not for this machine")
	}
	port := api.Find(l.intercept.Ports, func(p api.PortMap) bool {
		return p.Protocol == "tcp" && p.Container == l.request.Port
	})
	if port == nil {
		return check.Skipped("port %d of the pod has no port of this machine", l.request.Port)
	}
	switch s := j.Local[port.Place()]; {
	case s.Tried() && !s.Done:
		return check.Failed(api.ExitLocalPort, "nothing listens on %s: %s", port.Where(), s.Error).
			WithFix("Start your program there; on this machine it must listen on 127.0.0.1 or ::1. For another port, "+
				"run `kubevpn proxy %s --port LOCAL:%d`, for another host `--port %[2]d=HOST:PORT`.",
				api.ShellQuote(l.intercept.Workload), l.request.Port)
	case j.Trip.Answer.TimedOut():
		return check.Failed(api.ExitLocalHang, "the program on %s accepted it, and sent no answer within %.1f s",
			port.Where(), j.Trip.Answer.Seconds).
			WithFix("It may stand at a breakpoint, or hang. --timeout waits for longer.")
	}
	return check.OK("the program on %s has it", port.Where())
}
