package connection

import (
	"fmt"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// facts decide which netstack a connection uses.
type facts struct {
	Asked string // api.NetstackAuto, NetstackGVisor or NetstackSystem
	Proxy client.KubeProxy
	// Refusal says why there is no gateway: it may not be added, did not start, or is gone. Nil: there is one in the
	// traffic manager's pod, or the choice does not depend on it.
	Refusal *api.Error
	// Failed is what the probe of the system netstack did not reach: "clusterIP 10.96.0.1:443: no answer". Empty: the
	// probe has not run, or passed.
	Failed string
}

// decision is the result of choose. If Err is set, there is no netstack.
type decision struct {
	Netstack string
	Reason   string // for people; one line
	Err      *api.Error
}

// asksGateway reports whether the choice depends on the gateway.
func (f facts) asksGateway() bool {
	switch f.Asked {
	case api.NetstackGVisor:
		return false
	case api.NetstackSystem:
		return true
	}
	switch f.Proxy.Mode {
	case client.KubeProxyIPTables, client.KubeProxyNFTables, client.KubeProxyServed:
		return true
	}
	return false
}

// choose decides which netstack to use. docs/netstacks.md shows it as a table, which a test compares with choose.
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
		return gvisor("%s serves ClusterIPs in kube-proxy's place, by %s, and how it treats forwarded packets is "+
			"unknown", p.Replacement, p.By)
	case p.Mode == client.KubeProxyIPVS:
		return gvisor("ClusterIPs are served by IPVS, by %s, which masqueraded packets do not always get through", p.By)
	case p.Mode == client.KubeProxyNone:
		return gvisor("no kube-proxy serves ClusterIPs, judging by %s", p.By)
	case p.Mode == client.KubeProxyUnknown:
		return gvisor("kube-proxy's mode is unknown: %s", p.By)
	case f.Refusal != nil:
		return gvisor("kube-proxy is %s; but the system netstack is not available: %s", p, brief(f.Refusal.Message))
	case f.Failed != "":
		return gvisor("kube-proxy is %s; but the system netstack was tried and does not reach %s", p, f.Failed)
	default:
		return decision{Netstack: api.NetstackSystem,
			Reason: fmt.Sprintf("kube-proxy is %s, and the gateway is admitted", p)}
	}
}

// brief shortens a refusal for users who did not ask for the system netstack: it omits the list of the gateway's needs
// that pod security does not admit.
func brief(refusal string) string {
	if _, needs, ok := strings.Cut(client.PodSecurityViolation(refusal), `": `); ok {
		return strings.TrimSuffix(refusal, ": "+needs)
	}
	return refusal
}

// asSystem is choose for --netstack system.
func (f facts) asSystem() decision {
	switch {
	case f.Refusal != nil:
		e := api.Errorf(api.ExitNetstack, "the system netstack is not available: %w", f.Refusal)
		hint := "Without it: `kubevpn connect --netstack gvisor`"
		if f.Refusal.Hint != "" {
			hint = f.Refusal.Hint + "\n" + hint
		}
		return decision{Err: e.WithHint("%s", hint)}
	case f.Failed != "":
		return decision{Err: api.Errorf(api.ExitNetstack, "the system netstack does not reach %s (kube-proxy: %s)",
			f.Failed, f.Proxy).
			WithHint("`kubevpn connect --netstack gvisor` was tried just now, and reaches all of it.")}
	}
	return decision{Netstack: api.NetstackSystem, Reason: "asked for"}
}
