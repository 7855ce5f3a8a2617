package connection

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/host/sockets"
	"kubevpn/pkg/wire/transport"
)

// flows are the open flows that have a stream of their own. A stream counts its bytes itself, so a flow costs one entry
// while it is open, and a packet nothing.
type flows struct {
	mu   sync.Mutex
	open map[*openFlow]struct{}
}

// openFlow never changes, except that its stream is set once.
type openFlow struct {
	among    *flows
	proto    uint8
	src, dst netip.AddrPort
	since    time.Time
	stream   interface{ Stats() transport.StreamStats } // nil while it opens
}

// begin adds a flow whose stream is about to open.
func (fs *flows) begin(proto uint8, src, dst netip.AddrPort) *openFlow {
	f := &openFlow{among: fs, proto: proto, src: src, dst: dst, since: time.Now()}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.open == nil {
		fs.open = map[*openFlow]struct{}{}
	}
	fs.open[f] = struct{}{}
	return f
}

// opened sets the flow's stream.
func (f *openFlow) opened(stream interface{ Stats() transport.StreamStats }) {
	f.among.mu.Lock()
	defer f.among.mu.Unlock()
	f.stream = stream
}

// end removes the flow. Further calls do nothing.
func (f *openFlow) end() {
	f.among.mu.Lock()
	defer f.among.mu.Unlock()
	delete(f.among.open, f)
}

// list returns the flows that have a stream.
func (fs *flows) list() []*openFlow {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	all := make([]*openFlow, 0, len(fs.open))
	for f := range fs.open {
		if f.stream != nil {
			all = append(all, f)
		}
	}
	return all
}

// addRemotes adds the addresses to which there are flows, also those whose stream opens.
func (fs *flows) addRemotes(to map[netip.Addr]bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for f := range fs.open {
		to[f.dst.Addr()] = true
	}
}

// LocalSockets are the sockets of this machine, and the programs that have them, by inode. The zero value means that
// the system does not list them.
type LocalSockets struct {
	List     []sockets.Socket
	Programs map[uint32]sockets.Process
}

// Flows returns the open flows, in no order, without names and rates. Stall is set if bytes wait now: the caller finds
// out whether any move.
//
//	streams of the netstack    their own counts; the socket adds the program
//	TCP in packet streams      the kernel's counts and round trip of the socket
//	other packets              recently used addresses and ports; nothing counts their bytes
func (c *Connection) Flows(local LocalSockets) []api.Flow {
	mappings := c.mappings.now()
	local.List = slices.Clone(local.List) // other connections map others
	l := &flowList{to: c.packets.steering.Load(), local: local, bySource: map[socketKey]*sockets.Socket{},
		down: c.status.reconnecting()}
	for i := range l.local.List { // flows have the cluster's addresses
		s := &l.local.List[i]
		s.Remote = netip.AddrPortFrom(mappings.ToCluster(s.Remote.Addr()), s.Remote.Port())
	}
	l.index()
	l.transport, _ = c.transports.describe(time.Time{})
	paths := append([]string{c.pods.Transport()}, c.transports.used()...)
	for _, f := range c.flows.list() {
		l.addStream(f, paths)
	}
	for i := range l.local.List {
		s := &l.local.List[i]
		if hasStream := c.shortcuts.open.has(flow{s.Proto, s.Remote, s.Local.Port()}); !hasStream {
			l.addSocket(s)
		}
	}
	for _, f := range c.packets.sent.list() {
		l.addRecent(f)
	}
	return l.rows
}

// flowList collects the rows of Flows.
type flowList struct {
	to        *steering
	local     LocalSockets
	bySource  map[socketKey]*sockets.Socket
	transport string // in use
	down      bool   // no conn carries the session
	rows      []api.Flow
}

// socketKey finds a socket. UDP sockets that are not connected have no remote, and may have no local address.
type socketKey struct {
	proto         uint8
	local, remote netip.AddrPort
}

// index fills bySource.
func (l *flowList) index() {
	for i := range l.local.List {
		s := &l.local.List[i]
		key := socketKey{s.Proto, s.Local, s.Remote}
		if s.Remote.Port() == 0 {
			key.remote = netip.AddrPort{}
		}
		if s.Local.Addr().IsUnspecified() {
			key.local = netip.AddrPortFrom(netip.Addr{}, s.Local.Port())
		}
		l.bySource[key] = s
	}
}

// socket returns the socket of a flow, or nil.
func (l *flowList) socket(proto uint8, src, dst netip.AddrPort) *sockets.Socket {
	s := l.bySource[socketKey{proto, src, dst}]
	if s != nil || proto != packet.ProtoUDP {
		return s
	}
	if s = l.bySource[socketKey{proto: proto, local: src}]; s != nil {
		return s
	}
	return l.bySource[socketKey{proto: proto, local: netip.AddrPortFrom(netip.Addr{}, src.Port())}]
}

// row returns a row with the program of the socket, which may be nil.
func (l *flowList) row(proto uint8, src, dst netip.AddrPort, s *sockets.Socket) api.Flow {
	f := api.Flow{Protocol: protocolName(proto), Source: src, Destination: dst, Transport: l.transport}
	if s != nil {
		p := l.local.Programs[s.Inode]
		f.Program, f.PID = p.Name, p.PID
	}
	return f
}

func protocolName(proto uint8) string {
	switch proto {
	case packet.ProtoTCP:
		return "tcp"
	case packet.ProtoUDP:
		return "udp"
	case packet.ProtoICMP, packet.ProtoICMPv6:
		return "icmp"
	}
	return fmt.Sprintf("ip/%d", proto)
}

func (l *flowList) addStream(f *openFlow, paths []string) {
	socket, st := l.socket(f.proto, f.src, f.dst), f.stream.Stats()
	row := l.row(f.proto, f.src, f.dst, socket)
	row.Since, row.Counted, row.Sent, row.Received = f.since, true, st.Sent, st.Received
	if st.Path == shortPath {
		row.Transport = api.Shortcut
	} else if row.Seconds, row.Link = st.RTT.Seconds(), &st.Link; st.RTT > 0 {
		row.RoundTripTo = api.RoundTripManager
	}
	if st.Attached && st.Path >= 0 && st.Path < len(paths) {
		row.Transport = paths[st.Path]
	}
	switch {
	case !st.Attached:
		row.Stall = api.StallTunnel
	case st.Unread > 0 || socket != nil && socket.Unread > 0:
		row.Stall = api.StallProgram
	case st.Blocked:
		row.Stall = api.StallDestination
	}
	l.rows = append(l.rows, row)
}

// addSocket adds the flow of a TCP socket that has no stream: its packets cross whole, or it is still connecting.
func (l *flowList) addSocket(s *sockets.Socket) {
	if s.TCP == nil || !slices.Contains(l.to.own, s.Local.Addr()) || !s.TCP.Connecting && !l.to.whole(s.Remote.Addr()) {
		return
	}
	row := l.row(s.Proto, s.Local, s.Remote, s)
	row.Counted, row.Sent, row.Received, row.Retransmits = true, s.TCP.Sent, s.TCP.Received, s.TCP.Retransmits
	if row.Seconds = s.TCP.RTT.Seconds(); row.Seconds > 0 {
		row.RoundTripTo = api.RoundTripDestination
	}
	switch {
	case l.down:
		row.Stall = api.StallTunnel
	case s.TCP.Connecting:
		row.Stall = api.StallConnecting
	case s.Unread > 0:
		row.Stall = api.StallProgram
	case s.TCP.Unsent > 0:
		row.Stall = api.StallDestination
	}
	l.rows = append(l.rows, row)
}

// addRecent adds a flow of whole packets that is not TCP. If the system lists sockets, a UDP flow is open as long as
// its socket.
func (l *flowList) addRecent(f flow) {
	own := slices.IndexFunc(l.to.own, func(a netip.Addr) bool { return a.Is4() == f.remote.Addr().Is4() })
	if own < 0 {
		return
	}
	src := netip.AddrPortFrom(l.to.own[own], f.port)
	s := l.socket(f.proto, src, f.remote)
	if f.proto == packet.ProtoUDP && s == nil && l.local.List != nil {
		return
	}
	l.rows = append(l.rows, l.row(f.proto, src, f.remote, s))
}
