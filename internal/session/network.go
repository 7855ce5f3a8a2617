package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"go4.org/netipx"
	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/pkg/dns"
	"kubevpn/pkg/netstack"
	"kubevpn/pkg/route"
	"kubevpn/pkg/tun"
)

const (
	// settle joins changes that come together: a rollout, a new node.
	settle = 200 * time.Millisecond
	// relearn is how often the user's own view of the cluster's networks is renewed, where the manager has none.
	relearn = 5 * time.Minute
	// applyAgain is when a change that could not be applied is tried again: systemd-resolved may be restarting.
	applyAgain = 5 * time.Second
	// removeTimeout bounds taking the link back.
	removeTimeout = 5 * time.Second
	// namesTimeout bounds how long the first list of Services is waited for.
	namesTimeout = 2 * time.Second
	// tunnels is how many numbers there are for tunnels on one machine, all users together.
	tunnels = 64
)

// learnNetworks completes what the manager told with what the user's own rights show, where the manager lacks
// rights, and sees to the names of Services.
func (s *Session) learnNetworks(ctx context.Context, g *errgroup.Group) error {
	s.mu.Lock()
	state := s.state
	s.mu.Unlock()
	if s.lacking(state) {
		done := s.step("Finding the cluster's networks")
		if err := s.learnOwn(ctx); err != nil {
			return err
		}
		s.mu.Lock()
		own := s.own
		s.mu.Unlock()
		done("%d pod and %d Service networks by your own rights", len(own.Pods), len(own.Services))
	}
	if !state.ResolvesVIPs {
		g.Go(func() error { return s.watchNames(ctx, s.cluster.WatchServices) })
	}
	return s.awaitNames(ctx)
}

// awaitNames waits until the names of Services are known, so that short names resolve from the first moment on. They
// follow the manager's greeting at once.
func (s *Session) awaitNames(ctx context.Context) error {
	timer := time.NewTimer(namesTimeout)
	defer timer.Stop()
	select {
	case <-s.names.told:
	case <-timer.C:
		s.log.Warn("the names of Services are not known yet", "waited", namesTimeout)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// lacking reports whether the manager cannot tell all of the cluster's networks.
func (s *Session) lacking(state api.ManagerState) bool {
	return len(state.PodCIDRs) == 0 || len(state.ServiceCIDRs) == 0 ||
		slices.ContainsFunc(state.Missing, func(m string) bool {
			return strings.Contains(m, "nodes") || strings.Contains(m, "servicecidrs") || strings.Contains(m, "services")
		})
}

func (s *Session) learnOwn(ctx context.Context) error {
	own, err := s.cluster.CIDRs(ctx, s.Status().Namespace)
	if err != nil {
		return err
	}
	for _, c := range slices.Concat(own.Pods, own.Services) {
		if c.Source.Guessed() {
			s.warn(fmt.Sprintf("%v is %s: what is outside of it needs --extra-cidr", c.Prefix, c.Source))
		}
	}
	s.mu.Lock()
	s.own = own
	s.mu.Unlock()
	return nil
}

// watchNames follows the Services of the session's namespace, whichever it is, with the user's own rights, for short
// names, until the manager tells all of them.
func (s *Session) watchNames(ctx context.Context, watch func(context.Context, string, func(api.NameDelta)) error) error {
	for {
		s.mu.Lock()
		namespace := s.status.Namespace
		s.mu.Unlock()
		of, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		wg.Go(func() {
			err := watch(of, namespace, func(d api.NameDelta) {
				s.names.apply(fromUser, d)
				s.poke()
			})
			s.names.giveUp()
			if err != nil && of.Err() == nil {
				s.warn("Services in " + namespace + " have no short names: " + err.Error())
			}
		})
		select {
		case <-s.renamed:
		case <-ctx.Done():
		}
		cancel()
		wg.Wait()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// known gathers what plan needs.
func (s *Session) known() networks {
	s.mu.Lock()
	defer s.mu.Unlock()
	prefixes := func(cidrs []cluster.CIDR) (out []netip.Prefix) {
		for _, c := range cidrs {
			out = append(out, c.Prefix)
		}
		return out
	}
	n := networks{
		Pods:     slices.Concat(s.state.PodCIDRs, prefixes(s.own.Pods)),
		Services: slices.Concat(s.state.ServiceCIDRs, prefixes(s.own.Services)),
		Extra:    s.cfg.Request.ExtraCIDRs,
		Exclude:  s.cfg.Request.ExcludeCIDRs,
		Carrier:  slices.Clone(s.cluster.Addresses()),
		Inner:    s.inner,
	}
	if s.address.Resolver.IsValid() {
		n.Own = []netip.Addr{s.address.Resolver}
	}
	for _, a := range s.applied.Upstreams {
		// The machine's own nameservers, where the names of the outside go on going, may be behind a route that is
		// wider than the cluster's.
		n.Carrier = append(n.Carrier, a.Addr())
	}
	for _, a := range s.state.DNSServers {
		if !a.IsLinkLocalUnicast() && !a.IsLoopback() { // a node-local cache: asked through the manager, not routed
			n.DNS = append(n.DNS, a)
		}
	}
	if vip := s.state.CanaryVIP.Addr(); vip.IsValid() {
		n.VIPs = append(n.VIPs, vip)
	}
	return n
}

// bringUp makes the device, its routes and the names, and starts the netstack.
func (s *Session) bringUp(ctx context.Context, g *errgroup.Group) error {
	done := s.step("Configuring the network")
	if err := s.chooseNumber(); err != nil {
		return err
	}
	s.learnInner()
	routes, warnings := plan(s.known())
	s.warn(warnings...)
	if found, _ := plan(s.known().alone()); len(found) == 0 {
		return api.Errorf(api.ExitPermission, "neither pod nor Service networks of the cluster can be found").
			WithHint("Name them with --extra-cidr, or ask an admin to run `kubevpn install`, which grants the manager to read them.")
	}
	if err := s.refuseClashes(routes); err != nil {
		return err
	}
	f, err := s.createTUN(ctx)
	if err != nil {
		return err
	}
	device, err := tun.Adopt(f, s.address.Device, mtu)
	if err != nil {
		return err
	}
	stack, err := netstack.New(netstack.Config{Device: device, Dialer: s.dialer(), Diverter: s.lanes, Logger: s.log})
	if err != nil {
		return errors.Join(err, device.Close())
	}
	s.lanes.device.Store(&device)
	g.Go(func() error { return s.runStack(ctx, stack, device) })
	g.Go(func() error { return s.lanes.run(ctx) })
	s.serve = func(at netip.Addr) (func(), error) { return s.serveNames(ctx, g, stack, at) }
	if err := s.apply(ctx, routes); err != nil {
		return err
	}
	st := s.Status()
	done("%s, names by way of %s", st.Device, st.DNS.Mode)
	return nil
}

func (s *Session) runStack(ctx context.Context, stack *netstack.Stack, device tun.Device) error {
	err := stack.Run(ctx)
	if ctx.Err() == nil && err != nil {
		err = api.Errorf(api.ExitLost, "the TUN device is gone: %w", err).WithHint("Run `kubevpn connect` again.")
	}
	remove, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if removeErr := s.cfg.Network.RemoveLink(remove, device.Name()); removeErr != nil {
		s.log.Info("removing the link", "err", removeErr) // the helper may be gone, and its work with it
	}
	if closeErr := device.Close(); closeErr != nil && !errors.Is(closeErr, os.ErrClosed) {
		err = errors.Join(err, closeErr)
	}
	return err
}

// serveNames answers DNS at an address inside the tunnel, for resolvers that want a server per link.
func (s *Session) serveNames(ctx context.Context, g *errgroup.Group, stack *netstack.Stack, addr netip.Addr) (stop func(), err error) {
	at := netip.AddrPortFrom(addr, 53)
	packets, err := stack.ListenUDP(at)
	if err != nil {
		return nil, fmt.Errorf("answering DNS inside the tunnel: %w", err)
	}
	listener, err := stack.ListenTCP(at)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("answering DNS inside the tunnel: %w", err), packets.Close())
	}
	ctx, stop = context.WithCancel(ctx)
	g.Go(func() error {
		defer stop()
		err := s.cfg.Network.ServeDNS(ctx, []net.PacketConn{packets}, []net.Listener{listener})
		if ctx.Err() == nil && err != nil {
			return fmt.Errorf("answering DNS inside the tunnel: %w", err)
		}
		return nil
	})
	return stop, nil
}

// chooseNumber picks the first tunnel number whose device is free on this machine.
func (s *Session) chooseNumber() error {
	for n := range tunnels {
		name := deviceName(n)
		if _, err := net.InterfaceByName(name); err == nil {
			continue
		}
		s.mu.Lock()
		s.address.Device = name
		s.mu.Unlock()
		return nil
	}
	return api.Errorf(api.ExitClash, "no name is free for the tunnel: this machine has %d of them", tunnels).WithHint("`ip link` shows them.")
}

// taken are the networks of this machine, other tunnels among them, that an inner network must not overlap.
func (s *Session) taken() ([]netip.Prefix, error) {
	clashes, err := s.clashes(innerSpace, []string{s.addressing().Device})
	if err != nil {
		return nil, fmt.Errorf("looking at this machine's routes: %w", err)
	}
	var set netipx.IPSetBuilder
	for _, c := range clashes {
		set.AddPrefix(c.Other)
	}
	for _, p := range s.cfg.Request.ExtraCIDRs {
		if slices.ContainsFunc(innerSpace, p.Overlaps) {
			set.AddPrefix(p)
		}
	}
	s.mu.Lock()
	for _, p := range s.avoid {
		set.AddPrefix(p)
	}
	s.mu.Unlock()
	out, err := set.IPSet()
	if err != nil { // only invalid prefixes do that; the kernel and the command line have none
		return nil, err
	}
	return out.Prefixes(), nil
}

// learnInner finds which of the inner networks can be routed here: the session's own, and those of laptops that had to
// go elsewhere. Of these, one may be in use on this machine.
func (s *Session) learnInner() {
	s.mu.Lock()
	device, networks := s.address.Device, slices.Concat(s.address.Networks, s.state.InnerNetworks)
	s.mu.Unlock()
	slices.SortFunc(networks, func(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) })
	var inner []netip.Prefix
	for _, p := range slices.Compact(networks) {
		clashes, err := s.clashes([]netip.Prefix{p}, []string{device})
		if err != nil {
			s.log.Warn("looking at this machine's routes", "err", err)
		}
		if len(clashes) > 0 {
			s.warn(fmt.Sprintf("laptops with an address in %v are not reached: %v", p, clashes[0]))
			continue
		}
		inner = append(inner, p)
	}
	s.mu.Lock()
	s.inner = inner
	s.mu.Unlock()
	s.resteer()
}

// createTUN makes the device, under the next number if somebody else took the name meanwhile.
func (s *Session) createTUN(ctx context.Context) (*os.File, error) {
	var err error
	for range 3 {
		var f *os.File
		if f, err = s.cfg.Network.CreateTUN(ctx, s.address.Device, mtu); err == nil {
			if s.inside() { // where it was there before, and has a name
				s.mu.Lock()
				s.address.Device = f.Name()
				s.mu.Unlock()
			}
			return f, nil
		}
		if _, there := net.InterfaceByName(s.address.Device); there != nil {
			return nil, err
		}
		if err := s.chooseNumber(); err != nil {
			return nil, err
		}
	}
	return nil, err
}

// refuseClashes ends the attempt, before anything is changed, when a route would hide a local network.
func (s *Session) refuseClashes(routes []netip.Prefix) error {
	clashes, err := s.clashes(routes, nil)
	if err != nil {
		return fmt.Errorf("looking at this machine's routes: %w", err)
	}
	if len(clashes) == 0 {
		return nil
	}
	return clashError(clashes)
}

// clashError names the local networks and the shortest way around them.
func clashError(clashes []route.Clash) *api.Error {
	var text, exclude []string
	var around netipx.IPSetBuilder
	for _, c := range clashes {
		around.AddPrefix(narrower(c.Prefix, c.Other))
		if !slices.ContainsFunc(clashes, func(d route.Clash) bool { // an address says nothing beside its network
			return d.Prefix == c.Prefix && d.Link == c.Link && d.Other.Bits() < c.Other.Bits() && d.Other.Contains(c.Other.Addr())
		}) {
			text = append(text, c.String())
		}
	}
	set, err := around.IPSet()
	if err != nil { // only invalid prefixes do that; the kernel has none
		return api.Errorf(api.ExitUnexpected, "naming what overlaps: %w", err)
	}
	for _, p := range set.Prefixes() {
		exclude = append(exclude, "--exclude-cidr "+p.String())
	}
	return api.Errorf(api.ExitClash, "the cluster's network overlaps a local one: %s", strings.Join(text, "; ")).
		WithHint("Nothing was changed. To go on without that part of the cluster:\n  kubevpn connect %s", strings.Join(exclude, " "))
}

// narrower is the smaller of two prefixes that overlap.
func narrower(a, b netip.Prefix) netip.Prefix {
	if b.Bits() > a.Bits() {
		return b.Masked()
	}
	return a.Masked()
}

// maintain applies what changes after the connection is up, until ctx ends.
func (s *Session) maintain(ctx context.Context) error {
	tick := time.NewTicker(relearn)
	defer tick.Stop()
	again := time.NewTimer(0)
	again.Stop()
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again.C:
		case <-tick.C:
			s.mu.Lock()
			lacking := s.lacking(s.state)
			s.mu.Unlock()
			if !lacking {
				continue
			}
			if err := s.learnOwn(ctx); err != nil {
				s.log.Info("renewing the view of the cluster's networks", "err", err)
				continue
			}
		case <-s.updated:
			pause := time.NewTimer(settle)
			select {
			case <-pause.C:
			case <-ctx.Done():
				pause.Stop()
				return ctx.Err()
			}
		}
		s.learnInner()
		routes, warnings := plan(s.known())
		s.warn(warnings...)
		routes = s.dropClashes(routes)
		if err := s.apply(ctx, routes); err != nil && ctx.Err() == nil {
			// What was applied before still works, so this is no reason to end flows. (If the helper has ended, its
			// owner ends this session.)
			s.log.Warn("applying a change of the cluster's networks; trying again", "err", err, "in", applyAgain)
			again.Reset(applyAgain)
		}
	}
}

// dropClashes leaves out, with a warning, routes that came later and would hide a local network.
func (s *Session) dropClashes(routes []netip.Prefix) []netip.Prefix {
	clashes, err := s.clashes(routes, []string{s.address.Device})
	if err != nil {
		s.log.Warn("looking at this machine's routes", "err", err)
		return routes
	}
	for _, c := range clashes {
		s.warn(fmt.Sprintf("%v is not routed into the tunnel: %v", c.Prefix, c))
		routes = slices.DeleteFunc(routes, func(p netip.Prefix) bool { return p == c.Prefix })
	}
	return routes
}

// apply makes routes and names the machine's, if they differ from what it has.
func (s *Session) apply(ctx context.Context, routes []netip.Prefix) error {
	n := s.known()
	s.mu.Lock()
	state, namespace, address, before := s.state, s.status.Namespace, s.address, s.link
	s.status.Services = servicesBy(state, s.status.Netstack, s.status.ProxyMode)
	s.mu.Unlock()
	domain := state.DNSDomain
	reverse, _ := plan(networks{Pods: n.Pods, Services: n.Services, DNS: n.DNS})
	if err := s.serveAt(address.Resolver); err != nil {
		return err
	}
	var match, search []string
	left := 0
	if domain != "" {
		match, left = matchDomains(domain, reverseDomains(reverse), s.names.matchable())
		search = []string{namespace + ".svc." + domain, "svc." + domain, domain}
	}
	link := address.link(s.mtu(), routes, match, search)
	if s.inside() {
		link.Addrs = address.prefixes() // for the rest of the world has both families
	}
	if err := s.sendInside(routes); err != nil {
		return err
	}

	if err := s.setZone(state, namespace, reverse); err != nil {
		return err
	}
	if reflect.DeepEqual(link, before) {
		return nil
	}
	applied, err := s.cfg.Network.SetLink(ctx, link)
	if err != nil {
		return err
	}
	s.warn(applied.Warnings...)
	if left > 0 && applied.ResolverMode == api.ResolverResolved {
		s.warn("systemd-resolved takes a limited number of domains: NAME.NAMESPACE does not resolve in every namespace; NAME.NAMESPACE.svc does")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.link, s.applied = link, applied
	s.status.Device = link.Name
	s.status.CIDRs = routes
	s.status.Addresses = s.status.Addresses[:0:0]
	for _, a := range link.Addrs {
		s.status.Addresses = append(s.status.Addresses, a.Addr())
	}
	s.status.DNS = api.DNSStatus{Mode: applied.ResolverMode, Domain: domain, Servers: state.DNSServers}
	return nil
}

// serveAt has DNS answered at the resolver's address, which a new lease may have moved.
func (s *Session) serveAt(resolver netip.Addr) error {
	if s.serve == nil || s.at == resolver {
		return nil
	}
	stop, err := s.serve(resolver)
	if err != nil {
		return err
	}
	if s.stop != nil {
		s.stop()
	}
	s.at, s.stop = resolver, stop
	return nil
}

// servicesBy says who resolves ClusterIPs.
func servicesBy(state api.ManagerState, netstack, proxyMode string) string {
	if netstack == api.NetstackSystem {
		return "resolved by the cluster's own kube-proxy (" + proxyMode + ")"
	}
	if state.ResolvesVIPs {
		return "resolved by kubevpn"
	}
	return "dialled as they are: the traffic manager lacks " + strings.Join(state.Missing, ", ")
}

// setZone tells the machine's resolver which names are this cluster's, if that has changed.
func (s *Session) setZone(state api.ManagerState, namespace string, reverse []netip.Prefix) error {
	if state.DNSDomain == "" || len(state.DNSServers) == 0 {
		s.warn("the traffic manager's pod has no cluster DNS: names of the cluster are not resolved")
		s.zone = dns.Zone{}
		return s.cfg.Network.SetZone(nil)
	}
	servers := make([]netip.AddrPort, len(state.DNSServers))
	for i, a := range state.DNSServers {
		servers[i] = netip.AddrPortFrom(a, 53)
	}
	if !slices.Equal(servers, s.servers) { // it forgets its sockets, and which server was silent
		s.servers = servers
		s.nameservers.SetAddrs(servers)
	}
	zone := dns.Zone{Domain: state.DNSDomain, Namespace: namespace, Reverse: reverse, Cluster: s.nameservers}
	if s.names.known() != nobody {
		zone.Services = s.names.index
	}
	if reflect.DeepEqual(zone, s.zone) {
		return nil
	}
	s.zone = zone
	return s.cfg.Network.SetZone(&zone)
}
