package session

import (
	"fmt"
	"regexp"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// gatewayFact is what is known of the gateway, which the system netstack needs in the traffic manager's pod.
type gatewayFact int

const (
	gatewayUnasked gatewayFact = iota // nobody needed to know
	gatewayHad                        // it is there, or may be added
	gatewayRefused                    // it may not be added, did not start, or has gone; facts.Refusal says why
)

// facts are what decides which netstack a session uses.
type facts struct {
	Asked   string // api.NetstackAuto, NetstackGVisor or NetstackSystem
	Proxy   cluster.Proxy
	Gateway gatewayFact
	Refusal *api.Error // why, with gatewayRefused
	// Failed is what the system netstack was tried with and did not reach: "clusterIP 10.96.0.1:443: no answer". Empty:
	// it was not tried yet, or reached everything.
	Failed string
}

// decision is what comes of facts. With Err there is no netstack.
type decision struct {
	Netstack string
	Reason   string // for people; one line
	Err      *api.Error
}

// asksGateway reports whether the choice depends on the gateway. If not, nobody is asked for it.
func (f facts) asksGateway() bool {
	switch f.Asked {
	case api.NetstackGVisor:
		return false
	case api.NetstackSystem:
		return true
	}
	return f.Proxy.Mode == cluster.ProxyIPTables || f.Proxy.Mode == cluster.ProxyNFTables
}

// choose decides. docs/netstacks.md has it as a table, and a test holds the two together.
func choose(f facts) decision {
	switch f.Asked {
	case api.NetstackGVisor:
		return decision{Netstack: api.NetstackGVisor, Reason: "asked for"}
	case api.NetstackSystem:
		return f.asSystem()
	}
	gvisor := func(format string, args ...any) decision {
		return decision{Netstack: api.NetstackGVisor, Reason: fmt.Sprintf(format, args...)}
	}
	switch p := f.Proxy; {
	case p.Replacement != "":
		return gvisor("%s serves ClusterIPs in kube-proxy's place, by %s, and what it does with forwarded packets is not known", p.Replacement, p.By)
	case p.Mode == cluster.ProxyIPVS:
		return gvisor("ClusterIPs are served by IPVS, by %s, which masqueraded packets do not always get through", p.By)
	case p.Mode == cluster.ProxyNone:
		return gvisor("no kube-proxy serves ClusterIPs, by %s", p.By)
	case p.Mode == cluster.ProxyUnknown:
		return gvisor("what serves ClusterIPs is not known: %s", p.By)
	case f.Gateway == gatewayRefused:
		return gvisor("kube-proxy is %s; but the system netstack cannot be had: %s", p, brief(f.Refusal.Message))
	case f.Failed != "":
		return gvisor("kube-proxy is %s; but the system netstack was tried and does not reach %s", p, f.Failed)
	default:
		return decision{Netstack: api.NetstackSystem, Reason: fmt.Sprintf("kube-proxy is %s, and the gateway is admitted", p)}
	}
}

// podSecurity is what the API server says first of a pod that a namespace's level forbids. What else it says is about
// our own container: that it has what it needs.
var podSecurity = regexp.MustCompile(`violates PodSecurity "[^"]*"`)

// brief is a refusal for people who did not ask for what was refused.
func brief(refusal string) string {
	if at := podSecurity.FindStringIndex(refusal); at != nil {
		return refusal[:at[1]]
	}
	return refusal
}

// asSystem is choose for who wants the system netstack and no other.
func (f facts) asSystem() decision {
	switch {
	case f.Gateway == gatewayRefused:
		e := api.Errorf(api.ExitNetstack, "the system netstack cannot be had: %w", f.Refusal)
		hint := "Without it: `kubevpn connect --netstack gvisor`"
		if f.Refusal.Hint != "" {
			hint = f.Refusal.Hint + "\n" + hint
		}
		return decision{Err: e.WithHint("%s", hint)}
	case f.Failed != "":
		return decision{Err: api.Errorf(api.ExitNetstack, "the system netstack does not reach %s (kube-proxy: %s)", f.Failed, f.Proxy).
			WithHint("`kubevpn connect --netstack gvisor` was tried just now, and reaches all of it.")}
	}
	return decision{Netstack: api.NetstackSystem, Reason: "asked for"}
}
