package balancer

import "net/netip"

// Pick is the assignment of a flow to an endpoint. It is a value to avoid an allocation; callers must keep only one
// copy. It is not safe for concurrent use. The zero Pick belongs to a flow without a Service; Release and Stale
// accept it.
//
//	Pick ──▶ candidate ──refused──▶ Next ──▶ candidate ... ──▶ false: the flow is refused
//	             └─ connected ──▶ the flow ──▶ Release
type Pick struct {
	vip     *vip
	view    *view // source of the candidates of Next
	seen    *view // last view in which current was serving
	client  string
	start   int
	tried   int
	current *backend
}

// Endpoint returns the candidate to dial. It is invalid in a zero Pick and after Next has returned false.
func (p *Pick) Endpoint() netip.AddrPort {
	if p.current == nil {
		return netip.AddrPort{}
	}
	return p.current.addr
}

// Next replaces a candidate that refused by the next one, and reports whether there is one. It returns each
// endpoint that was usable at the time of the Pick once. The client's affinity changes with it.
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

// Release ends the assignment when the flow has ended. Further calls do nothing.
func (p *Pick) Release() {
	if p.current != nil {
		p.current.active.Add(-1)
		p.current = nil
	}
}

// Stale reports whether a flow of datagrams needs a new Pick, because its endpoint no longer serves while another
// one does, or the Service was deleted. In these cases kube-proxy removes a UDP flow from conntrack. If the verdict
// of the new Pick is not Chosen, the flow keeps its endpoint. Streams never move. Stale is cheap enough to call for
// each datagram.
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
