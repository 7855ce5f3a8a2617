package netstack

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"kubevpn/pkg/datapath/packet"
)

const (
	// queueLimit bounds the bytes of datagrams that wait for a flow's stream, with queueOverhead for each datagram. A
	// fast flow fills it in 100 ms, in which other programs on the path may be busy. Beyond queueSlack, a datagram is
	// also dropped while the first one has waited for queueWait: a longer queue does not make a slow path faster.
	queueLimit    = 8 << 20
	queueSlack    = 1 << 20
	queueWait     = 200 * time.Millisecond
	queueOverhead = 256
	// From the gatherFrom-th datagram of gatherTime on, datagrams wait for the end of this time, or until gatherBytes
	// wait.
	gatherTime  = time.Millisecond
	gatherFrom  = 8
	gatherBytes = 16 << 10
	// maxQueued bounds the bytes that wait in all flows together, and maxDatagramFlows the number of flows. Beyond
	// that number, existing flows continue and the first datagram of a new flow is dropped.
	maxQueued        = 64 << 20
	maxDatagramFlows = 8 << 10
	// maxPayload is the longest payload of a datagram: IPv6 allows 20 bytes more than IPv4.
	maxPayload = 65535 - 8
	dnsPort    = 53
	echoPrefix = 2 // bytes of sequence number before the payload of an echo packet
)

// flowKey identifies a UDP or echo flow. For echo, the port of src is the identifier that the pinging program chose.
type flowKey struct {
	proto    uint8
	src, dst netip.AddrPort
}

// datagrams holds the UDP and echo flows.
type datagrams struct {
	s      *Stack
	start  time.Time
	queued atomic.Int64 // sum of datagramFlow.queued
	mu     sync.Mutex
	flows  map[flowKey]*datagramFlow
}

func (d *datagrams) init(s *Stack) {
	d.s, d.start, d.flows = s, time.Now(), make(map[flowKey]*datagramFlow)
}

// handleUDP delivers a reassembled datagram that is not for a local service. The goroutine that reads the device calls
// it. If it returns false, gVisor answers ICMP port unreachable.
func (s *Stack) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	if s.isLocal(id.LocalAddress) {
		return false
	}
	udp := header.UDP(pkt.TransportHeader().Slice())
	length := int(udp.Length()) - header.UDPMinimumSize
	if length < 0 || length > pkt.Data().Size() || id.LocalPort == 0 {
		s.stats.malformed.Add(1)
		return true
	}
	payload := pkt.Data().ToBuffer()
	payload.Truncate(int64(length))
	s.datagrams.deliver(flowKey{
		proto: packet.ProtoUDP,
		src:   netip.AddrPortFrom(addrOf(id.RemoteAddress), id.RemotePort),
		dst:   netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort),
	}, pkt, payload)
	return true
}

// handleEcho delivers a reassembled ICMP echo request. It ignores other ICMP messages. If it returns false, gVisor
// answers echo requests itself.
func (s *Stack) handleEcho(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	if s.isLocal(id.LocalAddress) {
		return false
	}
	proto := uint8(packet.ProtoICMP)
	if id.LocalAddress.Len() == 16 {
		proto = packet.ProtoICMPv6
	}
	icmp := pkt.TransportHeader().Slice()
	if proto == packet.ProtoICMP && packet.Checksum(icmp, pkt.Data().Checksum()) != 0xffff {
		s.stats.malformed.Add(1) // gVisor checks only ICMPv6
		return true
	}
	// gVisor's header of an ICMPv6 message has only the type, code and checksum.
	rest := pkt.Data().ToBuffer()
	if missing := 8 - len(icmp); missing > 0 {
		view, ok := rest.PullUp(0, missing)
		if !ok {
			rest.Release()
			s.stats.malformed.Add(1)
			return true
		}
		icmp = append(icmp[:len(icmp):len(icmp)], view.AsSlice()...)
		rest.TrimFront(int64(missing))
	}
	ident, _, ok := packet.ParseEcho(proto, icmp)
	if !ok { // a reply or an error, but this stack sends no requests
		rest.Release()
		s.stats.ignored.Add(1)
		return true
	}
	payload := buffer.MakeWithView(buffer.NewViewWithData(icmp[6:8]))
	payload.Merge(&rest)
	s.datagrams.deliver(flowKey{
		proto: proto,
		src:   netip.AddrPortFrom(addrOf(id.RemoteAddress), ident),
		dst:   netip.AddrPortFrom(addrOf(id.LocalAddress), 0),
	}, pkt, payload)
	return true
}

// deliver queues a datagram in its flow, and creates the flow if there is none. It owns payload.
func (d *datagrams) deliver(key flowKey, pkt *stack.PacketBuffer, payload buffer.Buffer) {
	for {
		d.mu.Lock()
		f := d.flows[key]
		if f == nil && len(d.flows) >= maxDatagramFlows {
			d.mu.Unlock()
			d.s.stats.datagram(key.proto).dropped.Add(1)
			payload.Release()
			return
		}
		if f == nil {
			f = newDatagramFlow(d, key)
			d.flows[key] = f
			d.s.flows.Go(f.run)
		}
		d.mu.Unlock()
		if f.enqueue(pkt, payload) {
			return
		}
		// The flow ended between the two locks; the next round creates another.
	}
}

// end ends the flows to the addresses that match.
func (d *datagrams) end(match func(remote netip.Addr) bool) {
	d.mu.Lock()
	flows := slices.Collect(maps.Values(d.flows))
	d.mu.Unlock()
	for _, f := range flows {
		if match(f.key.dst.Addr()) {
			f.end()
		}
	}
}

func (d *datagrams) now() time.Duration { return time.Since(d.start) }

// datagramFlow is one UDP or echo flow.
//
//	app ─ enqueue ─ queue ─ drain ─ stream.WritePacket        (drain runs only while the queue is not empty)
//	app ◀ write ◀ run ◀ stream.ReadPackets
//
// It ends when the stream fails, which the application may learn from an ICMP error, or when it is idle.
type datagramFlow struct {
	d     *datagrams
	key   flowKey
	idle  time.Duration
	stats *flowCounters
	last  atomic.Int64 // datagrams.now at the last packet in either direction

	ctx    context.Context // for the dial; ends with the flow
	cancel context.CancelFunc

	mu       sync.Mutex
	stream   PacketStream // nil before the dial
	queue    []buffer.Buffer
	queued   int           // bytes with overhead, in queue and in drain's batch
	oldest   time.Duration // when the first datagram of drain's batch came, or of the queue if drain has none
	first    time.Duration // when the first datagram of the queue came
	draining bool
	ended    bool
	timer    *time.Timer

	since     time.Duration // when recent became 1
	recent    int           // datagrams in gatherTime from since on
	gathering bool          // gather runs
	gather    *time.Timer   // nil before the first use

	quote []byte // beginning of the application's last packet, for ICMP errors
}

func newDatagramFlow(d *datagrams, key flowKey) *datagramFlow {
	f := &datagramFlow{d: d, key: key, idle: d.s.cfg.UDPIdle, stats: d.s.stats.datagram(key.proto)}
	switch {
	case key.proto != packet.ProtoUDP:
		f.idle = d.s.cfg.EchoIdle
	case key.dst.Port() == dnsPort:
		f.idle = d.s.cfg.DNSIdle
	}
	f.ctx, f.cancel = context.WithCancel(d.s.ctx)
	f.stats.opened()
	f.touch()
	f.mu.Lock() // checkIdle reads f.timer
	defer f.mu.Unlock()
	f.timer = time.AfterFunc(f.idle, f.checkIdle)
	return f
}

func (f *datagramFlow) touch() { f.last.Store(int64(f.d.now())) }

// checkIdle ends an idle flow. The timer calls it.
func (f *datagramFlow) checkIdle() {
	rest := f.idle - (f.d.now() - time.Duration(f.last.Load()))
	if rest <= 0 {
		f.end()
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		f.timer.Reset(rest)
	}
}

// enqueue queues or drops payload and owns it then. It returns false, and leaves payload to the caller, if the flow has
// ended.
func (f *datagramFlow) enqueue(pkt *stack.PacketBuffer, payload buffer.Buffer) bool {
	size := int(payload.Size())
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return false
	}
	f.touch()
	f.quote = appendBeginning(f.quote[:0], pkt)
	now := time.Duration(f.last.Load())
	if now-f.since >= gatherTime {
		f.since, f.recent = now, 0
	}
	f.recent++
	late := f.queued > queueSlack && f.stream != nil && now-f.oldest > queueWait
	if late || f.queued > queueLimit || f.d.queued.Load() > maxQueued {
		f.stats.dropped.Add(1)
		payload.Release()
		return true
	}
	if len(f.queue) == 0 {
		f.first = now
	}
	if f.queued == 0 {
		f.oldest = now
	}
	f.queue = append(f.queue, payload)
	f.queued += size + queueOverhead
	f.d.queued.Add(int64(size + queueOverhead))
	f.startDraining()
	return true
}

// appendBeginning appends the part of a packet that an ICMP error quotes.
func appendBeginning(dst []byte, pkt *stack.PacketBuffer) []byte {
	dst = append(dst, pkt.NetworkHeader().Slice()...)
	dst = append(dst, pkt.TransportHeader().Slice()...)
	room := packet.MaxQuote - len(dst)
	data := pkt.Data().AsRange()
	if room <= 0 || data.Size() == 0 {
		return dst
	}
	view := data.Capped(room).ToView()
	dst = append(dst, view.AsSlice()...)
	view.Release()
	return dst
}

// startDraining starts drain if there is something to write and nothing to wait for. Call with f.mu held.
func (f *datagramFlow) startDraining() {
	if f.draining || f.stream == nil || len(f.queue) == 0 || f.gathers() {
		return
	}
	f.draining = true
	f.d.s.flows.Go(f.drain)
}

// gathers reports whether the queue waits for more datagrams. In a fast flow, one write to the session's conn then
// carries many: it crosses the API server and perhaps the kubelet and the container runtime, and costs them as much for
// one datagram as for ten. Call with f.mu held.
func (f *datagramFlow) gathers() bool {
	if f.recent < gatherFrom || f.queued >= gatherBytes || f.d.now()-f.since >= gatherTime {
		return false
	}
	if f.gathering {
		return true
	}
	f.gathering = true
	if left := gatherTime - (f.d.now() - f.since); f.gather == nil {
		f.gather = time.AfterFunc(left, f.gathered)
	} else {
		f.gather.Reset(left)
	}
	return true
}

// gathered ends the wait of gathers. The timer calls it.
func (f *datagramFlow) gathered() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gathering = false
	if !f.ended && !f.draining && len(f.queue) > 0 {
		f.draining = true
		f.d.s.flows.Go(f.drain)
	}
}

// unqueue releases a queued datagram. Call with f.mu held.
func (f *datagramFlow) unqueue(b *buffer.Buffer) {
	n := int(b.Size()) + queueOverhead
	f.queued -= n
	f.d.queued.Add(-int64(n))
	b.Release()
}

// drain writes the queue to the stream until the queue is empty.
func (f *datagramFlow) drain() {
	var batch []buffer.Buffer
	for {
		f.mu.Lock()
		for i := range batch {
			f.unqueue(&batch[i])
		}
		if len(f.queue) == 0 {
			f.draining = false
			f.queue = nil // an idle flow holds no memory
			f.mu.Unlock()
			return
		}
		batch, f.queue = f.queue, batch[:0]
		f.oldest = f.first
		stream := f.stream
		f.mu.Unlock()
		for i := range batch {
			size := int(batch[i].Size())
			// A datagram has several views only if it arrived in fragments; PullUp joins them.
			view, _ := batch[i].PullUp(0, size)
			if err := stream.WritePacket(view.AsSlice()); err != nil {
				f.fail(err)
				break // fail has emptied the queue, so the next round returns
			}
			f.stats.bytesOut.Add(uint64(size))
		}
	}
}

// run dials, and then copies from the stream to the application until the flow ends.
func (f *datagramFlow) run() {
	stream, err := f.dial()
	if err != nil {
		f.fail(err)
		return
	}
	f.mu.Lock()
	if f.ended {
		f.mu.Unlock()
		stream.Close()
		return
	}
	f.stream = stream
	f.startDraining()
	f.mu.Unlock()

	f.fail(f.copyDown(stream))
}

// packetBuffer holds packets of a stream, one behind the other.
type packetBuffer struct {
	data  [echoPrefix + maxPayload]byte
	sizes [maxBatch]int
}

// maxBatch is the number of packets that are read from a stream at once.
const maxBatch = 64

var packetBuffers = sync.Pool{New: func() any { return new(packetBuffer) }}

// packetReader is the receiving half of a PacketStream.
type packetReader interface {
	Wait() error
	ReadPackets(p []byte, sizes []int) (int, error)
}

// single reads from a PacketStream that has only the method ReadPacket.
type single struct{ PacketStream }

func (s single) Wait() error {
	if w, ok := s.PacketStream.(interface{ Wait() error }); ok {
		return w.Wait()
	}
	return nil
}

func (s single) ReadPackets(p []byte, sizes []int) (n int, err error) {
	sizes[0], err = s.ReadPacket(p)
	return 1, err
}

// copyDown copies packets from the stream to the application until reading fails, and returns its error.
func (f *datagramFlow) copyDown(stream PacketStream) error {
	r, ok := stream.(packetReader)
	if !ok {
		r = single{stream}
	}
	for {
		if err := r.Wait(); err != nil {
			return err
		}
		buf := packetBuffers.Get().(*packetBuffer)
		n, err := r.ReadPackets(buf.data[:], buf.sizes[:])
		if err == nil {
			f.writeAll(buf.data[:], buf.sizes[:n])
		}
		packetBuffers.Put(buf)
		if err != nil {
			return err
		}
	}
}

// writeAll sends the packets in p, which have these sizes, to the application.
func (f *datagramFlow) writeAll(p []byte, sizes []int) {
	f.touch()
	join := f.d.s.link.uso && f.key.proto == packet.ProtoUDP
	for len(sizes) > 0 {
		n, sum := 1, sizes[0]
		if join && f.d.s.link.fits(f.key.dst.Addr(), sizes[0]) {
			n, sum = packet.Train(sizes, maxTrain)
		}
		if err := f.write(p[:sum], sizes[0]); err != nil {
			f.stats.dropped.Add(uint64(n))
		} else {
			f.stats.bytesIn.Add(uint64(sum))
		}
		p, sizes = p[sum:], sizes[n:]
	}
}

func (f *datagramFlow) dial() (PacketStream, error) {
	dialer := f.d.s.cfg.Dialer
	if f.key.proto == packet.ProtoUDP {
		return dialer.DialUDP(f.ctx, f.key.src, f.key.dst)
	}
	return dialer.DialEcho(f.ctx, f.key.src.Addr(), f.key.dst.Addr())
}

// errShort is the error for an echo packet without a sequence number.
var errShort = errors.New("echo packet is too short")

// write sends one packet of the stream to the application, or several that have size bytes each, except that the last
// may be shorter.
func (f *datagramFlow) write(p []byte, size int) error {
	link := f.d.s.link
	switch {
	case size < len(p):
		return link.sendTrain(f.key.dst, f.key.src, p, size)
	case f.key.proto == packet.ProtoUDP:
		return link.sendUDP(f.key.dst, f.key.src, p)
	case len(p) < echoPrefix:
		return errShort
	}
	sequence := binary.BigEndian.Uint16(p)
	return link.sendEchoReply(f.key.dst.Addr(), f.key.src.Addr(), f.key.src.Port(), sequence, p[echoPrefix:])
}

// fail ends the flow, and sends the application the ICMP error for cause, if there is one.
func (f *datagramFlow) fail(cause error) {
	quote, first := f.end()
	if !first || errors.Is(cause, io.EOF) { // EOF: the far end closed the flow without an error
		return
	}
	reason := reasonOf(cause)
	f.stats.failed(reason)
	f.d.s.log.Debug("flow failed", "proto", f.key.proto, "dst", f.key.dst, "err", cause)
	if reason == packet.PortUnreachable && f.key.proto != packet.ProtoUDP {
		reason = packet.HostUnreachable
	}
	if reason == 0 {
		return
	}
	if err := f.d.s.link.sendError(reason, f.key.dst.Addr(), quote); err != nil {
		f.d.s.log.Debug("cannot report a failed flow", "proto", f.key.proto, "dst", f.key.dst, "err", err)
	}
}

// end ends the flow. For the call that ended it, first is true and quote is the flow's quote.
func (f *datagramFlow) end() (quote []byte, first bool) {
	f.mu.Lock()
	if f.ended {
		f.mu.Unlock()
		return nil, false
	}
	f.ended = true
	for i := range f.queue {
		f.unqueue(&f.queue[i])
	}
	f.queue, quote = nil, f.quote
	f.timer.Stop()
	if f.gather != nil {
		f.gather.Stop()
	}
	stream := f.stream
	f.mu.Unlock()

	// Run waits for the goroutines that cancel and Close end, but not for a timer that may have called this. So the
	// counts must be right before those goroutines return.
	f.d.mu.Lock()
	delete(f.d.flows, f.key)
	f.d.mu.Unlock()
	f.stats.open.Add(-1)
	f.cancel()
	if stream != nil {
		stream.Close()
	}
	return quote, true
}
