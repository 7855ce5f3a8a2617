package connection

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/datapath/routable"
)

// This file collects the input of the plan from the manager, from the cluster with the user's own rights, and from this
// machine's routes.

// learn reads the cluster's networks with the user's own rights if the manager lacks rights, and waits for the names of
// Services.
func (r *routes) learn(ctx context.Context, g *errgroup.Group) error {
	state := r.view.Load().state
	if lacking(state) {
		done := r.status.step("Finding the cluster's networks")
		if err := r.learnOwn(ctx); err != nil {
			return err
		}
		done("%d pod and %d Service networks by your own rights", len(r.own.Pods), len(r.own.Services))
	}
	if !state.ResolvesVIPs {
		g.Go(func() error { return r.followNames(ctx, r.cluster.Kube()) })
	}
	return r.names.await(ctx, r.log)
}

// lacking reports whether the manager may not know all of the cluster's networks: it lacks rights, or guesses networks
// from the Services of some namespaces only.
func lacking(state api.ManagerState) bool {
	return len(state.PodCIDRs) == 0 || len(state.ServiceCIDRs) == 0 || len(state.Namespaces) > 0 ||
		slices.ContainsFunc(state.Missing, func(m string) bool {
			return strings.Contains(m, "nodes") || strings.Contains(m, "pods") || strings.Contains(m, "servicecidrs") ||
				strings.Contains(m, "services")
		})
}

func (r *routes) learnOwn(ctx context.Context) error {
	own, err := r.cluster.CIDRs(ctx, r.namespace.Load())
	if err != nil {
		return err
	}
	for _, c := range guesses(own, r.view.Load().state) {
		r.status.warn(fmt.Sprintf("%v is %s: addresses outside of it need --extra-cidr", c.Prefix, c.Source))
	}
	r.own = own
	return nil
}

// guesses returns the networks of own that may be larger. It leaves out those in a network that the manager states.
func guesses(own client.CIDRs, state api.ManagerState) []client.CIDR {
	stated := slices.Concat(state.StatedPodCIDRs, state.StatedServiceCIDRs)
	return slices.DeleteFunc(slices.Concat(own.Pods, own.Services), func(c client.CIDR) bool {
		return !c.Source.Guessed() || slices.ContainsFunc(stated, func(p netip.Prefix) bool {
			return p.Overlaps(c.Prefix) && p.Bits() <= c.Prefix.Bits()
		})
	})
}

// learnInner finds the inner networks that this machine can route: its own, and those of laptops that use others. It
// leaves out a network that this machine uses, or in which it may reach other hosts: otherwise a user who avoids the
// usual inner networks could make everybody route one that hosts use.
func (r *routes) learnInner() {
	v := r.view.Load()
	networks := slices.Concat(v.lease.Networks, v.state.InnerNetworks)
	slices.SortFunc(networks, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
	})
	var inner []netip.Prefix
	var warnings []string
	for _, p := range slices.Compact(networks) {
		if !slices.Contains(v.lease.Networks, p) && !sharedInner(p) {
			warnings = append(warnings, fmt.Sprintf("laptops with an address in %v are not reached: other hosts may "+
				"have addresses there", p))
			continue
		}
		found, err := r.overlaps([]netip.Prefix{p})
		if err != nil {
			r.log.Warn("cannot look for overlaps", "err", err)
		}
		if len(found) > 0 {
			warnings = append(warnings, fmt.Sprintf("laptops with an address in %v are not reached: %v", p, found[0]))
			continue
		}
		inner = append(inner, p)
	}
	for _, w := range r.unreached {
		if !slices.Contains(warnings, w) { // the last laptop of a network has gone, or its network is free here
			r.status.withdraw(w)
		}
	}
	r.status.warn(warnings...)
	r.unreached = warnings
	r.packets.steer(func(s *steering) { s.inner = inner })
}

// known returns everything that the plan depends on.
func (r *routes) known() networks {
	v := r.view.Load()
	n := networks{
		Cluster:  slices.Concat(networksOf(v.state), r.own.Pods, r.own.Services),
		Extra:    r.cfg.Request.ExtraCIDRs,
		Exclude:  r.cfg.Request.ExcludeCIDRs,
		Consent:  r.cfg.Request.Consent.Networks,
		Path:     slices.Clone(r.cluster.Addresses()),
		Inner:    r.packets.steering.Load().inner,
		Hosts:    r.hosts.wanted(),
		InPod:    r.cluster.InPod(),
		NoMap:    r.cfg.Request.NoMap || r.cfg.proxied() || r.cfg.isolated(), // or else nothing overlaps
		Map:      r.cfg.Request.Map,
		Mapped:   r.planned.Mappings,
		Taken:    slices.Concat(v.lease.Networks, v.state.InnerNetworks),
		Overlaps: r.overlaps,
		Foreign:  func(link string) bool { return isForeign(link, linkNames(r.cfg.Network.Others())) },
	}
	if r.cfg.proxied() {
		n.Inner = nil // other laptops are reached with a device only
	} else if v.lease.Resolver.IsValid() {
		n.Own = []netip.Addr{v.lease.Resolver, v.lease.Resolver.Next()}
	}
	n.Path = append(n.Path, keptOut(r.reached.Load(), v.state)...)
	for _, a := range r.applied.Upstreams {
		// The machine's own nameservers still answer for other names. A network of the cluster may contain them.
		n.Path = append(n.Path, a.Addr())
	}
	for _, a := range v.state.DNSServers {
		if !a.IsLinkLocalUnicast() && !a.IsLoopback() { // a node-local cache: asked through the manager, not routed
			n.DNS = append(n.DNS, a)
		}
	}
	if vip := v.state.ProbeVIP.Addr(); vip.IsValid() {
		n.VIPs = append(n.VIPs, vip)
	}
	return n
}

// networksOf returns the networks that the manager reports, each with its source.
func networksOf(state api.ManagerState) (out []client.CIDR) {
	add := func(prefixes, stated []netip.Prefix, statedBy, guessed client.Source) {
		var known, rest netipx.IPSetBuilder
		for _, p := range stated {
			if p.IsValid() {
				known.AddPrefix(p)
				out = append(out, client.CIDR{Prefix: p.Masked(), Source: statedBy})
			}
		}
		for _, p := range prefixes {
			if p.IsValid() {
				rest.AddPrefix(p)
			}
		}
		rest.RemoveSet(routable.Set(&known))
		for _, p := range routable.Set(&rest).Prefixes() {
			out = append(out, client.CIDR{Prefix: p, Source: guessed})
		}
	}
	add(state.PodCIDRs, state.StatedPodCIDRs, client.FromNodes, client.FromPods)
	add(state.ServiceCIDRs, state.StatedServiceCIDRs, client.FromServiceCIDR, client.FromServices)
	add(state.Ignored, nil, "", client.FromPods)
	return out
}
