package balancer

import "net/netip"

// Pick is a flow's place at an endpoint. It is a value so that picking allocates nothing: keep one copy only.
// It is for one goroutine at a time. The zero Pick is a flow that no Service is behind: Release and Stale may
// be called on it.
//
//	Pick ──▶ candidate ──refused──▶ Next ──▶ candidate ... ──▶ false: the flow is refused
//	             └─ connected ──▶ the flow ──▶ Release
type Pick struct {
	vip     *vip
	view    *view // whose candidates Next goes through
	seen    *view // in which current was last found to be serving
	client  string
	start   int
	tried   int
	current *backend
}

// Endpoint is the candidate to dial. It is invalid in a zero Pick and after Next has returned false.
func (p *Pick) Endpoint() netip.AddrPort {
	if p.current == nil {
		return netip.AddrPort{}
	}
	return p.current.addr
}

// Next goes on to another candidate, because the current one refused, and reports whether there is one. Each
// endpoint that was usable when the Pick was made comes once. The client's affinity follows.
func (p *Pick) Next() bool {
	if p.current == nil {
		return false
	}
	failed := p.current
	p.Release()
	p.tried++
	if n := len(p.view.usable); p.tried < n {
		p.current = p.view.usable[(p.start+p.tried)%n]
		p.current.active.Add(1)
	}
	if p.view.affinity > 0 {
		p.vip.affinity.move(p.client, failed, p.current)
	}
	return p.current != nil
}

// Release says that the flow has ended. More than one call is as one.
func (p *Pick) Release() {
	if p.current != nil {
		p.current.active.Add(-1)
		p.current = nil
	}
}

// Stale reports whether a flow of datagrams should be picked anew, as kube-proxy removes a UDP flow from
// conntrack: its endpoint serves no longer and another one does, or the Service was deleted. If the new Pick's
// verdict is not Chosen, the flow stays where it is. Streams are never moved. It is cheap enough for each
// datagram.
func (p *Pick) Stale() bool {
	if p.current == nil {
		return false
	}
	w := p.vip.view.Load()
	if w == p.seen {
		return false
	}
	if w.gone {
		return true
	}
	if w.isServing(p.current) || (len(w.serving) == 0 && (w.serving != nil || len(w.usable) == 0)) {
		p.seen = w
		return false
	}
	return true
}
