package intercept

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"

	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/protocol/interceptor"
)

// Requests of programs of this machine to the workload do not leave it if they match: the connection decides by
// request, as an agent does. Others go to the workload's pods as before.

// shortcut is connection.Shortcut.
type shortcut = func(ctx context.Context, conn net.Conn, src, dst netip.AddrPort,
	far func(context.Context) (net.Conn, error))

// farKey is the key of a flow's far dial in its context.
type farKey struct{}

// here is the program of this machine that receives the requests for a port of the workload.
type here struct {
	server *server
	port   port
}

// Dial implements interceptor.Target.
func (h here) Dial(ctx context.Context, _ interceptor.Flow) (net.Conn, error) {
	conn, err := h.server.dialTCP(ctx, ctx.Done(), h.server.local[h.port])
	if err != nil {
		return nil, err // not a conn that is nil
	}
	return conn, nil
}

// Away implements interceptor.Target.
func (here) Away() bool { return false }

// newShortcut returns the shortcut to a port of the workload.
func (i *Intercept) newShortcut(match *httpmatch.Match, to port) shortcut {
	claims := []interceptor.Claim{{ID: "shortcut", Match: match, NoStore: !i.cfg.Spec.Cache,
		Target: &here{i.server, to}, Stats: &i.short}}
	in := interceptor.New(interceptor.Config{
		Claims: func(string, uint16) []interceptor.Claim { return claims },
		Application: func(ctx context.Context, _ interceptor.Flow) (net.Conn, error) {
			far, ok := ctx.Value(farKey{}).(func(context.Context) (net.Conn, error))
			if !ok {
				return nil, errors.ErrUnsupported // ServeConn passes its context on
			}
			return far(ctx)
		},
		Note: func(string, uint16, string) {}, Logger: i.log,
	})
	return func(ctx context.Context, conn net.Conn, src, dst netip.AddrPort,
		far func(context.Context) (net.Conn, error)) {
		flow := interceptor.Flow{Protocol: "tcp", Client: src, Dst: dst}
		in.ServeConn(context.WithValue(ctx, farKey{}, far), conn, flow)
	}
}

// followShortcuts keeps the shortcuts to the workload's Services and intercepted pods until ctx ends. There are none
// while requests are recorded: agents do that.
func (i *Intercept) followShortcuts(ctx context.Context) error {
	match, err := httpmatch.New(i.cfg.Spec.Match)
	if err != nil {
		return err
	}
	ports := map[uint16]shortcut{}
	for _, p := range i.claim.Ports {
		if p.Protocol == "tcp" {
			ports[p.Port] = i.newShortcut(match, port{p.Protocol, p.Port})
		}
	}
	defer i.cfg.Session.SetShortcuts(i.claim.ID, nil)
	for {
		i.mu.Lock()
		changed := i.changed.Next()
		i.mu.Unlock()
		recording, recorded := i.records.options.Get()
		to := map[netip.AddrPort]shortcut{}
		if !recording.on {
			for at, number := range i.ownAddresses() {
				to[at] = ports[number]
			}
		}
		i.cfg.Session.SetShortcuts(i.claim.ID, to)
		select {
		case <-changed:
		case <-recorded:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// shortens reports whether programs of this machine may reach its program without the cluster.
func (i *Intercept) shortens() bool {
	s := i.cfg.Spec
	return !s.NoShortcut && !s.Mirror && !i.cfg.Clone && s.TLS == nil && i.via == nil
}

// ownAddresses returns the addresses that lead to intercepted TCP ports: ClusterIPs, unless others have changed where
// they lead, and the pods that are intercepted.
func (i *Intercept) ownAddresses() map[netip.AddrPort]uint16 {
	found := map[netip.AddrPort]uint16{}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.clusterIPs(func(w way, at netip.AddrPort) {
		if w.protocol == "tcp" && i.now.cut == "" && len(i.now.changes) == 0 {
			found[at] = w.to
		}
	})
	for _, c := range i.byUID {
		if !c.active() {
			continue
		}
		for _, text := range c.pod.Status.PodIPs {
			ip, err := netip.ParseAddr(text.IP)
			if err != nil {
				continue
			}
			for _, p := range i.claim.Ports {
				if p.Protocol == "tcp" {
					found[netip.AddrPortFrom(ip, cmp.Or(p.Listen, p.Port))] = p.Port
				}
			}
		}
	}
	return found
}
