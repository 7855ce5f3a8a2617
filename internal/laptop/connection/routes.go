package connection

import (
	"context"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/route"
	"kubevpn/pkg/wakeup"
)

const (
	// settle is how long maintain waits for further changes: a rollout or a new node causes several.
	settle = 200 * time.Millisecond
	// relearn is how often maintain renews the user's own view of the cluster's networks.
	relearn = 5 * time.Minute
	// applyAgain is the pause after a failure to apply a change: systemd-resolved may be restarting.
	applyAgain = 5 * time.Second
	// maxNetworks limits the networks that a message names.
	maxNetworks = 8
)

// routes plans which networks go into the tunnel, and has Network apply the plan. One goroutine uses it: establish, and
// then maintain.
//
//	view, own rights, request ─▶ known ─▶ plan ─▶ apply ─┬─▶ Network.SetLink: addresses, routes, resolver
//	      ▲                                              └─▶ zone: names
//	      └── changed: maintain plans again
type routes struct {
	*shared
	zone    *zone
	stack   atomic.Pointer[netstack.Stack]
	device  *tun.Mapped  // nil: none
	own     client.CIDRs // what the user's own rights show; zero unless the manager lacks rights
	planned planned      // as applied
	link    api.Link     // as applied
	applied api.NetworkApplied

	unreached []string // warnings about inner networks that this machine cannot route
}

// maintain applies what changes after the connection is up, until ctx ends.
func (r *routes) maintain(ctx context.Context) error {
	tick := time.NewTicker(relearn)
	defer tick.Stop()
	sweep := time.NewTicker(hostTick)
	defer sweep.Stop()
	var again <-chan time.Time
	for {
		if err := r.awaitChange(ctx, tick.C, sweep.C, again); err != nil {
			return err
		}
		err := r.replan(ctx)
		if err != nil && ctx.Err() == nil && r.hosts.fail(err) {
			err = r.replan(ctx)
		}
		if err != nil && ctx.Err() == nil {
			// The state that was applied before still works, so flows must not end. (If the helper has ended, the
			// owner of this connection ends it.)
			r.log.Warn("cannot apply a change of the cluster's networks; trying again", "err", err, "in", applyAgain)
			again = time.After(applyAgain)
		}
	}
}

// awaitChange returns when another plan may differ from the last one, or ctx's error. It renews the user's own view of
// the cluster's networks when tick fires, and looks for hosts that nothing uses when sweep fires.
func (r *routes) awaitChange(ctx context.Context, tick, sweep, again <-chan time.Time) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again:
			return nil
		case <-r.hosts.asked: // an answer waits
			return nil
		case <-sweep:
			if r.hosts.sweep() {
				return nil
			}
		case <-tick:
			if !lacking(r.view.Load().state) {
				continue
			}
			err := r.learnOwn(ctx)
			if err == nil {
				return nil
			}
			r.log.Info("cannot renew the view of the cluster's networks", "err", err)
		case <-r.changed:
			wakeup.Pause(ctx, settle)
			return ctx.Err()
		}
	}
}

// plan returns the plan for what is known now, and shows its warnings.
func (r *routes) plan() (planned, error) {
	r.learnInner()
	known := r.known()
	p, err := plan(known)
	if err != nil {
		return planned{}, err
	}
	r.status.warn(p.Warnings...)
	r.warnOfGateway(known)
	return p, nil
}

// replan applies what has changed. It leaves out networks that need consent or would hide a local one, with a warning.
func (r *routes) replan(ctx context.Context) error {
	p, err := r.plan()
	if err != nil {
		return err
	}
	for _, c := range p.Ask[:min(len(p.Ask), maxNetworks)] {
		r.status.warn(fmt.Sprintf("%v (%s) is not routed: %s, and you have not allowed it; disconnect and connect "+
			"again to be asked, or use --extra-cidr",
			c.Prefix, c.Source, public))
	}
	for _, o := range p.Overlaps {
		r.status.warn(fmt.Sprintf("%v is not routed into the tunnel: %v", o.Prefix, o))
		p.Routes = slices.DeleteFunc(p.Routes, func(p netip.Prefix) bool { return p == o.Prefix })
	}
	if err := r.apply(ctx, p); err != nil {
		return err
	}
	r.hosts.settle(p)
	return nil
}

// apply gives the machine the routes and names of a plan, as far as they differ from what it has.
func (r *routes) apply(ctx context.Context, p planned) error {
	v := r.view.Load()
	r.status.change(func(report *report) {
		report.shown.Limited = v.state.Limited
		report.shown.Services = servicesBy(v.state, report.shown.Netstack, report.shown.ProxyMode)
	})
	if err := r.zone.serveAt(v.lease.Resolver); err != nil {
		return err
	}
	routes, reverse := p.local(p.Routes), slices.Clone(p.Cluster)
	for _, m := range p.Mappings {
		reverse = append(reverse, m.Local)
	}
	match, search, left := r.zone.domains(v.state.DNSDomain, reverse)
	link := api.Link{
		Name: r.packets.deviceName(), MTU: r.packets.steering.Load().mtu(), Routes: routes, Named: p.Named,
		Resolver: v.lease.Resolver, MatchDomains: match, SearchDomains: search,
	}
	switch {
	case r.cfg.proxied():
	case r.cfg.isolated():
		link.Addrs = hostPrefixes(v.lease.Addrs) // for the rest of the world, which has both families
		link.Names = r.podNames()
		r.steerIsolated(p.Routes)
	default:
		link.Addrs = linkAddrs(v.lease, routes)
	}
	r.remap(ctx, p)
	if !reflect.DeepEqual(link, r.link) {
		applied, err := r.cfg.Network.SetLink(ctx, link)
		if err != nil {
			return err
		}
		r.link, r.applied = link, applied
		r.status.warn(applied.Warnings...)
		if left > 0 && applied.ResolverMode == api.ResolverResolved {
			r.status.warn("systemd-resolved accepts a limited number of domains: NAME.NAMESPACE does not resolve in " +
				"every namespace; NAME.NAMESPACE.svc does")
		}
	}
	// Names follow the link: a link that the helper rejects gets none.
	if err := r.zone.set(v.state, reverse); err != nil {
		return err
	}
	r.planned = p
	r.hosts.routes.Store(&p.Routes)
	label := alias(&r.cfg.Request)
	if label != "" && r.cfg.Network.DomainTaken(label) { // checker.targets says so
		label = ""
	}
	r.status.change(func(report *report) {
		report.shown.Device, report.shown.CIDRs, report.shown.Addresses = link.Name, p.Routes, nil
		report.shown.Mappings = p.Mappings
		for _, a := range link.Addrs {
			report.shown.Addresses = append(report.shown.Addresses, a.Addr())
		}
		report.shown.DNS = api.DNSStatus{Mode: r.applied.ResolverMode, Domain: v.state.DNSDomain,
			Alias:   label,
			Limited: !r.view.Load().state.ResolvesVIPs,
			Servers: v.state.DNSServers, ExtraDomains: r.cfg.Request.ExtraDomains,
			ExcludeDomains: r.cfg.Request.ExcludeDomains, Programs: v.lease.Resolver.Next()}
	})
	return nil
}

// steerIsolated sets the cluster's networks for an isolated device, which receives all packets.
func (r *routes) steerIsolated(networks []netip.Prefix) {
	set := routable.Of(networks)
	r.packets.steer(func(s *steering) { s.routed = set })
}

// servicesBy describes how ClusterIPs are resolved.
func servicesBy(state api.ManagerState, netstack, proxyMode string) string {
	switch {
	case netstack == api.NetstackSystem:
		return "resolved by the cluster's own kube-proxy (" + proxyMode + ")"
	case !state.ResolvesVIPs:
		return "dialed as they are: the traffic manager lacks " + strings.Join(state.Missing, ", ")
	case state.Authorized:
		text := "resolved by kubevpn for pods of which you may forward ports"
		if len(state.Namespaces) > 0 {
			text += ", in " + strings.Join(state.Namespaces, ", ")
		}
		return text + "; the others are rejected"
	case state.Limited:
		return "resolved by kubevpn in " + strings.Join(state.Namespaces, ", ") + "; rejected in other namespaces"
	case len(state.Namespaces) > 0:
		text := "resolved by kubevpn in " + strings.Join(state.Namespaces, ", ") +
			"; dialed as they are in other namespaces"
		if len(state.Missing) > 0 {
			text += "; the traffic manager lacks " + strings.Join(state.Missing, ", ")
		}
		return text
	}
	return "resolved by kubevpn"
}

// warnOfGateway warns of what the gateway cannot carry, if this cluster needs it.
func (r *routes) warnOfGateway(known networks) {
	to := r.packets.steering.Load()
	g := to.gateway
	if !to.system || g == nil {
		return
	}
	says := ""
	if len(g.Warnings) > 0 {
		says = "; the gateway says: " + strings.Join(g.Warnings, "; ")
	}
	switch {
	case !g.IPv4:
		r.status.warn("gvisor carries IPv4" + says)
	case g.IPv6:
		r.status.warn(g.Warnings...)
	case known.hasIPv6():
		r.status.warn("gvisor carries IPv6" + says)
	default:
		r.log.Info("the gateway carries no IPv6, and this cluster has none", "says", g.Warnings)
	}
}

// consentError names the public networks that the cluster states. They are not routed unless the user allows them.
func consentError(ask []client.CIDR) *api.Error {
	var all netipx.IPSetBuilder
	for _, c := range ask {
		all.AddPrefix(c.Prefix)
	}
	text := api.Texts(ask, func(c client.CIDR) string { return fmt.Sprintf("%v (%s)", c.Prefix, c.Source) })
	exclude := api.Texts(ask[:min(len(ask), maxNetworks)], func(c client.CIDR) string {
		return "--exclude-cidr " + c.Prefix.String()
	})
	err := api.Errorf(api.ExitConsent,
		"the cluster states networks outside of private address space, which are routed only if you allow it: %s",
		api.Some(text, maxNetworks))
	err.Needs = &api.Consent{Networks: routable.Set(&all).Prefixes()}
	return err.WithHint("Nothing was changed. If these are the cluster's own, allow them once:\n  kubevpn connect "+
		"--yes\nTo go on without them:\n  kubevpn connect %s",
		strings.Join(exclude, " "))
}

// overlapError names the local networks that overlap, and the shortest way to connect without them.
func overlapError(overlaps []route.Overlap) *api.Error {
	var text []string
	var without netipx.IPSetBuilder
	for _, o := range overlaps {
		without.AddPrefix(narrower(o.Prefix, o.Other))
		if !slices.ContainsFunc(overlaps, func(other route.Overlap) bool { // an address adds nothing to its network
			return other.Prefix == o.Prefix && other.Link == o.Link && other.Other.Bits() < o.Other.Bits() &&
				other.Other.Contains(o.Other.Addr())
		}) {
			text = append(text, o.String())
		}
	}
	exclude := api.Texts(routable.Set(&without).Prefixes(), func(p netip.Prefix) string {
		return "--exclude-cidr " + p.String()
	})
	return api.Errorf(api.ExitOverlap, "the cluster's network overlaps a local one: %s", strings.Join(text, "; ")).
		WithHint("Nothing was changed. To go on without that part of the cluster:\n  kubevpn connect %s",
			strings.Join(exclude, " "))
}

// narrower returns the smaller of two prefixes that overlap.
func narrower(a, b netip.Prefix) netip.Prefix {
	if b.Bits() > a.Bits() {
		return b.Masked()
	}
	return a.Masked()
}
