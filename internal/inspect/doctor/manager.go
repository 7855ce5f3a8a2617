package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/kube/podconn"
	"kubevpn/internal/process/version"
)

// rights reviews what the user may do.
func rights(ctx context.Context, f *facts) api.Finding {
	m, err := f.manager()
	if err != nil {
		return check.Skipped("the namespace of the traffic manager is unknown: %v", err)
	}
	table := install.Check(ctx, f.cluster, install.RightsTable(m.Namespace, f.prepared.Namespace))
	allowed := 0
	notes := api.Texts(table, func(r install.Right) string {
		if len(r.Missing) > 0 {
			return fmt.Sprintf("no: %s (you may not %s)", r.Gives, api.Some(r.Missing, 1))
		}
		allowed++
		return "yes: " + r.Gives
	})
	return check.OK("you have %d of these %d rights", allowed, len(table)).WithNotes(notes...)
}

// manager checks whether there is a usable traffic manager, or the user may install one.
func manager(_ context.Context, f *facts) api.Finding {
	const effect = "`kubevpn connect` fails"
	switch m, err := f.manager(); {
	case err != nil:
		return failed(err, "`kubevpn connect` cannot find the traffic manager")
	case len(m.Lacking) > 0:
		doing := "install"
		if m.Installed {
			doing = "use"
		}
		return broken(api.ExitPermission, effect, "ask a cluster admin to run\n"+m.Ask, "you may not %s the traffic "+
			"manager in the namespace %s: this requires the right to %s", doing, m.Namespace, api.Join(m.Lacking))
	case m.Starting:
		return warning("`kubevpn connect` waits until it is ready, for a limited time", m.Problem.Hint, "%s",
			m.Problem.Message)
	case m.Problem != nil:
		return failed(m.Problem, effect)
	case !m.Installed:
		return check.OK("none yet: `kubevpn connect` installs it in the namespace %s", m.Namespace)
	default:
		return check.OK("pod %s/%s, image %s", m.Namespace, m.Pod, m.Image)
	}
}

// session opens a session with the traffic manager, unless the daemon has one.
func session(ctx context.Context, f *facts) api.Finding {
	if c := f.connected(); c != nil {
		f.transports, f.managerVersion = c.Transports, c.ManagerVersion
		return check.OK("the connection %s has one, by %s", c.ID, c.Transport)
	}
	at, err := f.manager()
	if err != nil || at.Pod == "" {
		return check.Skipped("no traffic manager is ready")
	}
	hello, all, err := f.Try(ctx, f.cluster, at.Namespace, at.Pod)
	if err != nil {
		return failed(err, "`kubevpn connect` fails")
	}
	f.transports, f.managerVersion, f.missing = all, hello.Version, hello.State.Missing
	return check.OK("the traffic manager answers; %s use it", api.Count(max(hello.State.Sessions-1, 0), "laptop"))
}

// connected returns the daemon's connection to this cluster if it works, or nil.
func (f *facts) connected() *api.Connection {
	return api.Find(f.connections(), func(c api.Connection) bool { return c.Status == api.StatusConnected })
}

// managerVersion compares the version of the traffic manager with that of this program.
func managerVersion(_ context.Context, f *facts) api.Finding {
	manager, own := f.managerVersion, version.String()
	if manager == own {
		return check.OK("%s, as this program", own)
	}
	return warning("they understand each other; features of the newer one may be missing",
		"kubevpn connect --upgrade   # or install kubevpn "+api.ShellQuote(manager),
		"the traffic manager is kubevpn %s, and this is %s", manager, own)
}

// managerRights checks whether the traffic manager has its rights.
func managerRights(_ context.Context, f *facts) api.Finding {
	switch m, _ := f.manager(); { // session has used it
	case f.connected() != nil:
		return check.Skipped("the warnings of the connection name what the manager may not do: `kubevpn status`")
	case len(f.missing) == 0:
		return check.OK("it may read Services, endpoints, nodes and networks")
	default:
		return warning("ClusterIPs, short names or networks of the cluster are incomplete",
			"ask a cluster admin to run\nkubevpn install --manager-namespace "+api.ShellQuote(m.Namespace),
			"the traffic manager may not %s", api.Join(f.missing))
	}
}

// kubeProxy finds out what serves ClusterIPs.
func kubeProxy(ctx context.Context, f *facts) api.Finding {
	m, _ := f.manager() // without its node, KubeProxy compares the annotations of all nodes
	p, modes := f.cluster.KubeProxy(ctx, m.Node), f.cluster.NodeModes(ctx)
	known := slices.Concat(slices.Collect(maps.Values(modes))...)
	if c := f.connected(); c != nil && c.ProxyMode == string(client.KubeProxyIPVS) && !slices.Contains(known, m.Node) {
		modes[client.KubeProxyIPVS] = append(modes[client.KubeProxyIPVS], m.Node) // the connection has proof
	}
	return proxyOf(p, modes)
}

// proxyOf judges what serves ClusterIPs by the cluster's configuration, and the modes that nodes are known to have.
func proxyOf(p client.KubeProxy, modes map[client.KubeProxyMode][]string) api.Finding {
	if p.Replacement == "" && len(modes) > 0 {
		each := api.Texts(slices.Sorted(maps.Keys(modes)), func(mode client.KubeProxyMode) string {
			return fmt.Sprintf("%s on %s", mode, api.Some(modes[mode], shown))
		})
		p = client.KubeProxy{Mode: client.KubeProxyIPVS,
			By: api.Join(each) + "; in the cluster's configuration it is " + p.String()}
		if len(modes[client.KubeProxyIPVS]) == 0 {
			return check.OK("%s", p.By)
		}
	}
	switch {
	case p.Mode == client.KubeProxyIPVS && !strings.HasPrefix(p.By, "kube-router "):
		return warning("Kubernetes turns IPVS off by default in 1.40, where nftables becomes the default, and removes "+
			"it in 1.43 (KEP-5495). `connect` uses gvisor, because masqueraded packets do not always get through IPVS",
			"kubectl -n kube-system edit configmap kube-proxy   # mode: nftables, then\n"+
				"kubectl -n kube-system rollout restart daemonset kube-proxy",
			"kube-proxy serves ClusterIPs with IPVS, by %s", p.By)
	case p.PodSockets:
		return warning("Cilium serves ClusterIPs at the sockets of pods, and packets that the system netstack "+
			"forwards pass none: Services may not answer with --netstack system. `connect` uses gvisor",
			"helm upgrade cilium cilium/cilium -n kube-system --reuse-values --set socketLB.hostNamespaceOnly=true",
			"%v; socketLB.hostNamespaceOnly is off", p)
	case p.Mode == client.KubeProxyUnknown:
		return check.Skipped("the mode is unknown: %s", p.By)
	case p.Mode == client.KubeProxyNone && p.Replacement == "":
		return warning("kubevpn resolves ClusterIPs itself, with the gvisor netstack; the system netstack does not "+
			"reach them", "kubevpn connect --netstack gvisor   # what `auto` chooses here",
			"no kube-proxy serves ClusterIPs, judging by %s", p.By)
	}
	return check.OK("%s", p.String())
}

// upgrades checks whether what is before the API server passes the protocols of port-forwards.
func upgrades(ctx context.Context, f *facts) api.Finding {
	m, err := f.manager()
	namespace, pod := m.Namespace, m.Pod
	if pod == "" {
		namespace = f.prepared.Namespace
		pod, err = install.AnyPod(ctx, f.cluster, namespace)
	}
	if err != nil || pod == "" {
		return check.Skipped("there is no pod in the namespace %s to which a port-forward could be opened", namespace)
	}
	d := podconn.New(f.cluster)
	try := func(how podconn.Protocol) *api.Error {
		bounded, cancel := context.WithTimeout(ctx, f.Timeout/2)
		defer cancel()
		return f.cluster.Explain(d.Try(bounded, how, namespace, pod))
	}
	return upgradesOf(try(podconn.SPDYProtocol), try(podconn.WebSocketProtocol), f.proxy())
}

// proxy names the proxy before the API server, or what could be one.
func (f *facts) proxy() string {
	if path, err := f.cluster.Path(); err == nil && path.Proxy != "" {
		return "the proxy " + path.Proxy
	}
	return "a proxy or load balancer before the API server"
}

// upgradesOf judges the errors of both protocols; nil means that it works.
func upgradesOf(spdy, websocket *api.Error, proxy string) api.Finding {
	switch {
	case spdy == nil && websocket == nil:
		return check.OK("port-forwards pass, by SPDY and by WebSocket")
	case spdy == nil:
		return check.OK("port-forwards pass by SPDY, which kubevpn prefers; not by WebSocket: %s", websocket.Message)
	case websocket == nil:
		return warning("port-forwards use WebSocket, which is slower by a fifth to a half; the first one may wait for "+
			"5 s", "# let it pass the header `Upgrade: SPDY/3.1`; kubevpn works without it:\nkubevpn connect",
			"%s blocks SPDY: %s", proxy, spdy.Message)
	case spdy.Code == api.ExitPermission:
		return check.Skipped("%s", spdy.Message)
	}
	return broken(websocket.Code, "`kubevpn connect` and `kubectl exec` fail", "kubectl port-forward   # it fails the "+
		"same way: "+proxy+" must forward the headers Connection and Upgrade",
		"port-forwards pass neither by SPDY (%s) nor by WebSocket (%s)", spdy.Message, websocket.Message)
}

// transportCheck returns the check of one transport.
func transportCheck(name string) func(context.Context, *facts) api.Finding {
	return func(_ context.Context, f *facts) api.Finding {
		t := api.Find(f.transports, func(t api.Transport) bool { return t.Name == name })
		return transportOf(*cmp.Or(t, &api.Transport{State: api.TransportTrying}))
	}
}

func transportOf(t api.Transport) api.Finding {
	switch t.State {
	case api.TransportTrying:
		return check.Skipped("it was not tried in time")
	case api.TransportOff:
		return check.Skipped("it is off: %s", t.Reason)
	case api.TransportFailing:
		if t.Name == api.TransportDirect {
			return check.OK("not reachable from this machine, as in most clusters: %s", t.Reason)
		}
		return warning("the connection uses port-forward, which is slower",
			"kubevpn connect --transport "+t.Name+"   # says more", "%s does not work: %s", t.Name, t.Reason)
	}
	return check.OK("round trip %.1f ms", t.Seconds*1e3)
}
