package intercept

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/transport"
)

// maxLocalhost limits the conns to the pod's localhost, and its ports.
const maxLocalhost = 1024

// Localhost is the loopback interface of a program with a network of its own: a sandbox.Place.
type Localhost interface {
	// Localhost makes connections to these ports of 127.0.0.1 and ::1 arrive at the listener, unless the program
	// listens there itself. Each call replaces the ports, and returns another listener of the same socket.
	Localhost(ctx context.Context, ports []netip.AddrPort) (net.Listener, error)
}

// program returns the container in whose place the program is, and its TCP ports: in the pod nobody else can serve
// them.
func (v *Via) program(w *workloads.Workload) (container string, ports []uint16, err error) {
	c, err := w.Container(v.i.cfg.Spec.Container)
	if err != nil && v.localhost == nil && len(w.Template.Spec.Containers) > 0 {
		return w.Template.Spec.Containers[0].Name, nil, nil // flows leave from all alike
	}
	if err != nil {
		return "", nil, err
	}
	for _, p := range c.Ports {
		if p.Protocol == corev1.ProtocolTCP || p.Protocol == "" {
			ports = append(ports, uint16(p.ContainerPort))
		}
	}
	return c.Name, ports, nil
}

// loopbackPorts returns the ports of 127.0.0.1 and ::1 at which a pod answers, except some. state may be nil.
func loopbackPorts(state *api.AgentState, except []uint16) (ports []netip.AddrPort) {
	if state == nil {
		return nil
	}
	loopback4, loopback6 := netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()
	for _, l := range state.Listens {
		if slices.Contains(except, l.Port()) {
			continue
		}
		switch a := l.Addr().Unmap(); a {
		case loopback4, loopback6:
			ports = append(ports, netip.AddrPortFrom(a, l.Port()))
		case netip.IPv4Unspecified():
			ports = append(ports, netip.AddrPortFrom(loopback4, l.Port()))
		case netip.IPv6Unspecified(): // it also takes IPv4, unless it says otherwise
			ports = append(ports, netip.AddrPortFrom(loopback4, l.Port()), netip.AddrPortFrom(loopback6, l.Port()))
		}
	}
	slices.SortFunc(ports, netip.AddrPort.Compare)
	ports = slices.Compact(ports)
	return ports[:min(len(ports), maxLocalhost)]
}

// serveLocalhost makes the program's loopback addresses lead to those of the pod. It calls ready once they do so for
// the ports of this moment, and then follows changes until ctx ends.
//
//	program ─▶ its 127.0.0.1:5432 ─▶ listener ─▶ relay ══▶ agent ─▶ the pod's 127.0.0.1:5432
func (v *Via) serveLocalhost(ctx context.Context, ready func()) {
	if v.localhost != nil && !v.mayExec && v.egress != api.EgressNone { // else begin has said so
		v.warn(v.mustExec("what other containers of the pod serve on localhost does not answer"))
	}
	if v.localhost == nil || !v.mayExec {
		ready()
		return
	}
	var relays sync.WaitGroup
	defer relays.Wait()
	var accepting net.Listener
	for ctx.Err() == nil {
		ports, changed := v.listens.Get()
		if accepting != nil || len(ports) > 0 {
			l, err := v.localhost.Localhost(ctx, ports)
			switch {
			case err != nil && ctx.Err() == nil:
				v.warn(err)
			case err != nil:
			case accepting == nil:
				accepting = l
				relays.Go(func() { v.acceptLocalhost(ctx, l, &relays) })
				defer context.AfterFunc(ctx, func() { l.Close() })()
			default:
				l.Close() // of the same socket
			}
		}
		ready()
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// warn reports why the pod's localhost does not answer.
func (v *Via) warn(err error) { v.i.warn("the pod's localhost does not answer: " + err.Error()) }

// acceptLocalhost relays conns until ctx ends.
func (v *Via) acceptLocalhost(ctx context.Context, l net.Listener, relays *sync.WaitGroup) {
	open := authlistener.Bound{Max: maxLocalhost}
	err := authlistener.Serve(ctx, l, v.i.log, func(conn net.Conn) {
		held := open.Enter(conn)
		relays.Go(func() {
			defer held.Leave()
			v.relayLocalhost(ctx, conn.(*net.TCPConn))
		})
	})
	if err != nil {
		v.warn(err)
	}
}

// relayLocalhost connects a conn to where the program wanted to connect, in the pod. If nobody answers there, it resets
// conn.
func (v *Via) relayLocalhost(ctx context.Context, conn *net.TCPConn) {
	address := func(a net.Addr) netip.AddrPort {
		p := a.(*net.TCPAddr).AddrPort()
		return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
	}
	opening, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	s, err := v.Session(opening)
	if err != nil {
		reset(conn)
		return
	}
	stream, err := s.Open(opening, transport.Request{Proto: transport.ProtoTCP, Src: address(conn.RemoteAddr()),
		Dst: address(conn.LocalAddr())})
	if err != nil {
		v.i.log.Debug("the pod's localhost", "address", conn.LocalAddr(), "err", err)
		reset(conn)
		return
	}
	defer context.AfterFunc(ctx, func() { stream.Reset() })()
	relay(stream, conn, stream.Gone())
}
