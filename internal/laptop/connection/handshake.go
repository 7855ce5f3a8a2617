package connection

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/wire/transport"
)

// view is the latest state that the traffic manager sent to this laptop.
type view struct {
	hello *api.ManagerHello // the latest; nil: no manager has greeted this laptop
	state api.ManagerState
	lease api.Lease // the inner addresses of this laptop
	// gatewayPod is the pod of the last manager that had a gateway, also after the gateway is gone.
	gatewayPod string
}

// pod returns the pod of the manager that greeted this laptop last.
func (v view) pod() string {
	if v.hello == nil {
		return ""
	}
	return v.hello.Pod
}

// learn stores a state of the manager.
func (v *view) learn(state api.ManagerState) {
	v.state = state
	if state.Gateway != nil {
		v.gatewayPod = v.pod()
	}
}

// gatewayServes reports whether the manager has a gateway that knows the networks of this laptop's lease. A gateway
// that does not know them drops packets from there.
func (v view) gatewayServes() bool {
	g := v.state.Gateway
	return g != nil && !slices.ContainsFunc(v.lease.Networks, func(p netip.Prefix) bool {
		forwarded := p.Addr().Is4() && g.IPv4 || p.Addr().Is6() && g.IPv6
		return forwarded && !slices.ContainsFunc(g.Addrs, p.Contains) // it has an address in each network that it knows
	})
}

// handshake talks to the traffic manager on the control stream of each transport session, and publishes the view.
//
//	session begins ─▶ ClientHello ─▶ ManagerHello: lease, state ─▶ State, Names, ... ─▶ the session ends
//	                                     │ rejected                    │
//	                                     ▼                             ▼
//	                                  refuse                     view, names, changed
type handshake struct {
	*shared
	manager *manager
	avoid   []netip.Prefix // networks of other connections that overlapped a lease; used by onSession alone
	refuse  func(error)    // ends the connection: the manager rejects this laptop for good
	retry   func()         // tries direct again: the manager has other addresses
}

// onSession talks to the manager until the session ends. The transport runs it for one session at a time.
func (h *handshake) onSession(ctx context.Context, ts *transport.Session) {
	err := h.converse(ctx, ts)
	h.current.clear(ts)
	var refused *api.Error
	if errors.As(err, &refused) { // also if the session is over: the manager ends a session that it rejects
		h.refuse(refused)
		return
	}
	if ctx.Err() != nil {
		return
	}
	h.log.Warn("the control stream ended; opening a new session", "err", err)
	if err := ts.Close(); err != nil {
		h.log.Debug("closing the session", "err", err)
	}
}

func (h *handshake) converse(ctx context.Context, ts *transport.Session) error {
	stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		return fmt.Errorf("opening the control stream: %w", err)
	}
	defer stream.Close()
	own, err := h.hello()
	if err != nil {
		return err
	}
	c, hello, err := startControl(stream, own, func(nonce string) (string, error) {
		return identify(ctx, h.cluster.Kube(), h.manager.location.Load().namespace, nonce)
	})
	if err != nil {
		return err
	}
	lease, err := leased(hello.Lease)
	if err != nil {
		return err
	}
	state, err := h.accept(hello.State)
	if err != nil {
		return err
	}
	if h.avoid = h.cfg.Network.Reserve(lease.Networks); len(h.avoid) > 0 {
		// The other lease began at the same time: its routes were not in the kernel for hello to see.
		return fmt.Errorf("the lease overlaps that of another connection, which has %v", h.avoid)
	}
	if before := h.view.Load().hello; before != nil && before.Version != hello.Version {
		h.status.withdraw(h.manager.location.Load().imageWarning)
	}
	// before the session: api-proxy dials this pod
	h.manager.location.Update(func(l *managerLocation) { l.pod = hello.Pod })
	h.packets.steer(func(s *steering) { s.own, s.resolver = lease.Addrs, lease.Resolver })
	h.view.Update(func(v *view) {
		v.hello, v.lease = hello, lease
		v.learn(state) // before the session: direct dials its addresses
	})
	h.current.set(ts)
	h.learn(state)
	h.changed.Raise()
	return c.follow(ctx, h.handle)
}

// learn publishes a state of the manager that has greeted this laptop.
func (h *handshake) learn(state api.ManagerState) {
	if !slices.Equal(h.view.Load().state.Direct, state.Direct) {
		defer h.retry()
	}
	h.view.Update(func(v *view) { v.learn(state) })
	if state.Gateway != nil {
		h.packets.steer(func(s *steering) { s.gateway = state.Gateway }) // other families, or another MTU
	}
	serves := h.view.Load().gatewayServes()
	h.status.change(func(r *report) { r.greeted, r.gateway = true, serves })
}

// handle processes one message of the manager.
func (h *handshake) handle(m api.ControlMessage) {
	if m.Names != nil {
		if left := h.names.apply(fromManager, *m.Names); left > 0 {
			h.status.warn("the traffic manager lists Services that kubevpn does not accept; their short names do not " +
				"resolve")
		}
	}
	if m.State != nil {
		state, err := h.accept(*m.State)
		if err != nil { // only a first hello can fail
			h.log.Error("ignoring a state of the traffic manager", "err", err)
			return
		}
		h.learn(state)
	}
	h.changed.Raise()
}

// clientID returns the identity of this client towards one manager: 32 hex digits, the same for the same secret. Nobody
// can guess it or compute it without the secret, not even another manager.
func clientID(secret []byte, cluster, namespace string) (string, error) {
	id, err := hkdf.Key(sha256.New, secret, nil, "kubevpn client\n"+cluster+"\n"+namespace, 16)
	if err != nil {
		return "", fmt.Errorf("deriving the client's identity: %w", err)
	}
	return hex.EncodeToString(id), nil
}

// hello returns this laptop's hello. It names the system netstack as long as the connection may use it, because the
// manager then passes the laptop's packets as soon as there is a gateway.
func (h *handshake) hello() (api.ClientHello, error) {
	avoid, err := h.taken()
	if err != nil {
		return api.ClientHello{}, err
	}
	use := cmp.Or(h.status.netstack(), h.cfg.netstack())
	if use == api.NetstackAuto {
		use = api.NetstackSystem
	}
	client, err := clientID(h.cfg.Client, h.cluster.ID(), h.manager.location.Load().namespace)
	if err != nil {
		return api.ClientHello{}, err
	}
	return api.ClientHello{
		Protocol: api.Protocol, Oldest: api.OldestProtocol, Version: version.String(), Client: client,
		Namespace: h.namespace.Load(), Scheduler: h.cfg.Request.Scheduler,
		Netstack: use, MayUseGVisor: h.cfg.netstack() != api.NetstackSystem,
		Lease: h.view.Load().lease.Addrs, Avoid: avoid,
		ExtraCIDRs: h.cfg.Request.ExtraCIDRs, NoGSO: !h.packets.gso(),
	}, nil
}

// taken returns the networks of this machine, other tunnels among them, that an inner network must not overlap.
func (h *handshake) taken() ([]netip.Prefix, error) {
	found, err := h.overlaps(routable.Inner())
	if err != nil {
		return nil, err
	}
	var set netipx.IPSetBuilder
	for _, o := range found {
		set.AddPrefix(o.Other)
	}
	for _, p := range slices.Concat(h.cfg.Request.ExtraCIDRs, h.cfg.Request.ExcludeCIDRs) {
		if slices.ContainsFunc(routable.Inner(), p.Overlaps) {
			set.AddPrefix(p)
		}
	}
	for _, a := range h.cluster.Addresses() { // they are never routed
		if a = a.Unmap(); covers(routable.Inner(), a) {
			set.Add(a)
		}
	}
	for _, p := range h.avoid {
		set.AddPrefix(p)
	}
	out, err := set.IPSet()
	if err != nil { // only invalid prefixes cause this; the kernel and the command line have none
		return nil, err
	}
	return out.Prefixes(), nil
}
