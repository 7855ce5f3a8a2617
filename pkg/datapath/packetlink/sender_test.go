package packetlink

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/pkg/datapath/packet"
)

// memStream is a packet stream in memory.
type memStream struct {
	mu     sync.Mutex
	writes [][]byte
	err    error         // of the next Write
	gate   chan struct{} // a Write waits until it can receive; nil: it does not
	closed chan struct{}
	once   sync.Once
	gone   chan struct{}
}

func newMemStream() *memStream {
	return &memStream{closed: make(chan struct{}), gone: make(chan struct{})}
}

func (s *memStream) Write(b []byte) (int, error) {
	if s.gate != nil {
		select {
		case <-s.gate:
		case <-s.closed:
			return 0, net.ErrClosed
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	s.writes = append(s.writes, bytes.Clone(b))
	return len(b), nil
}

func (s *memStream) Close() error          { s.once.Do(func() { close(s.closed) }); return nil }
func (s *memStream) Gone() <-chan struct{} { return s.gone }

func (s *memStream) isClosed() bool {
	select {
	case <-s.closed:
		return true
	default:
		return false
	}
}

func (s *memStream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// frames returns the written frames, and forgets them.
func (s *memStream) frames(t *testing.T) [][]byte {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	got, malformed, err := receiveAll(bytes.NewReader(bytes.Join(s.writes, nil)))
	if err != nil || malformed > 0 {
		t.Fatalf("the written bytes are not frames: %d malformed, %v", malformed, err)
	}
	s.writes = nil
	return got
}

// rig is a Sender that runs in a bubble, on streams in memory.
type rig struct {
	*Sender
	t       *testing.T
	streams [Streams]*memStream
	opened  [Streams]int // to be read while all goroutines wait
	mu      sync.Mutex
	openErr error
	cancel  context.CancelFunc
	done    chan struct{}
}

func newRig(t *testing.T, cfg SenderConfig) *rig {
	r := &rig{t: t, done: make(chan struct{})}
	for i := range r.streams {
		r.streams[i] = newMemStream()
	}
	if cfg.Open == nil {
		cfg.Open = func(_ context.Context, stream int) (io.WriteCloser, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.opened[stream]++
			if r.openErr != nil {
				return nil, r.openErr
			}
			return r.streams[stream], nil
		}
	}
	r.Sender = NewSender(cfg)
	return r
}

func (r *rig) run() {
	ctx, cancel := context.WithCancel(r.t.Context())
	r.cancel = cancel
	go func() { r.Run(ctx); close(r.done) }()
}

func (r *rig) end() {
	r.t.Helper()
	r.cancel()
	<-r.done
}

// refuse makes Open fail with err.
func (r *rig) refuse(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.openErr = err
}

func (r *rig) send(s spec) { r.Send(frame(s.bytes())) }

// counts returns how many frames each stream received since the last call.
func (r *rig) counts() (n [Streams]int) {
	r.t.Helper()
	synctest.Wait()
	for i, s := range r.streams {
		n[i] = len(s.frames(r.t))
	}
	return n
}

// want checks that since the last call, one stream received this many frames and the others none.
func (r *rig) want(stream, frames int) {
	r.t.Helper()
	var w [Streams]int
	w[stream] = frames
	if got := r.counts(); got != w {
		r.t.Fatalf("frames by stream: %v, want %v", got, w)
	}
}

// of returns a packet of the same flow with another payload. It is no super-packet if the payload fits in one segment.
func (s spec) of(payload int) spec {
	s.payload = payload
	if payload <= s.gso {
		s.gso = 0
	}
	return s
}

var (
	bulkFlow   = spec{payload: 60000, gso: 1400, sport: 1, dport: 80}
	bulkFrame  = len(wire(bulkFlow.bytes()))
	sparseFlow = spec{payload: 1, sport: 2, dport: 22}
)

func (r *rig) streamOf(s spec) int {
	f := frame(s.bytes())
	defer f.Release()
	h, err := f.Header()
	if err != nil {
		r.t.Fatal(err)
	}
	hash, _ := r.flows.hash(&h, f.Packet())
	return bulkStream(hash)
}

// newStalledRig returns a rig in which each Write to the stream of bulkFlow waits for a value on the stream's gate.
func newStalledRig(t *testing.T) (r *rig, bulk int) {
	r = newRig(t, SenderConfig{GSO: true})
	bulk = r.streamOf(bulkFlow)
	r.streams[bulk].gate = make(chan struct{})
	return r, bulk
}

func TestBulkLeavesStreamZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		r.run()
		defer r.end()
		bulk := r.streamOf(bulkFlow)
		r.send(bulkFlow)
		r.want(0, 1) // 60000 bytes may be a big answer
		r.send(bulkFlow)
		r.want(bulk, 1)
		r.send(bulkFlow)
		r.send(bulkFlow)
		r.want(bulk, 2)
		r.send(sparseFlow)
		r.want(0, 1)

		// 240000 bytes are below 16 KiB after four halvings, and above after three.
		time.Sleep(3*halfLife + halfLife/2)
		small := bulkFlow.of(10)
		r.send(small)
		r.want(bulk, 1)
		time.Sleep(halfLife)
		r.send(small)
		r.want(0, 1)
		// From there, it takes 64 KiB again.
		r.send(bulkFlow)
		r.want(bulk, 1)

		// A flow of 300 KB/s stays sparse for good.
		slow := spec{payload: 1400, sport: 7}
		for range 2000 {
			r.send(slow)
			time.Sleep(time.Second * 1400 / 300e3)
		}
		r.want(0, 2000)
	})
}

func TestFlowKeepsItsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bulk := newStalledRig(t)
		r.run()
		defer r.end()
		r.send(bulkFlow)
		r.send(bulkFlow)
		if got := r.counts(); got != [Streams]int{0: 1} {
			t.Fatal(got)
		}
		// The bulk stream stalls with a frame of the flow in it, which the flow must not overtake.
		time.Sleep(time.Hour)
		small := bulkFlow.of(10)
		r.send(small)
		if got := r.counts(); got != [Streams]int{} {
			t.Fatalf("the flow overtook itself: %v", got)
		}
		r.streams[bulk].gate <- struct{}{}
		r.streams[bulk].gate <- struct{}{}
		want := [Streams]int{}
		want[bulk] = 2
		if got := r.counts(); got != want {
			t.Fatal(got)
		}
		r.send(small)
		if got := r.counts(); got != [Streams]int{0: 1} {
			t.Fatalf("the flow did not return to stream 0: %v", got)
		}
	})
}

func TestOthersStayInStreamZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		r.run()
		defer r.end()
		out := packet.Outgoing{Src: netip4, Dst: netip4, Proto: packet.ProtoICMP, PayloadLen: 60000}
		b := append(out.Append(make([]byte, packet.VirtioLen)), make([]byte, out.PayloadLen)...)
		for range 10 {
			r.Send(frame(b))
		}
		if got := r.counts(); got != [Streams]int{0: 10} {
			t.Error(got)
		}
	})
}

// The fragments of a datagram are one flow, though only the first has the ports.
func TestFragmentsAreOneFlow(t *testing.T) {
	var table flows
	var hashes []uint64
	for offset, b := range map[int]byte{0: 1, 1480: 2, 2960: 3} {
		out := packet.Outgoing{Src: netip4, Dst: netip4, Proto: packet.ProtoUDP, PayloadLen: 8, Fragment: true, FragmentOffset: offset, MoreFragments: offset < 2000}
		p := append(out.Append(nil), bytes.Repeat([]byte{b}, 8)...)
		h, err := packet.Parse(p)
		if err != nil {
			t.Fatal(err)
		}
		hash, ok := table.hash(&h, p)
		if !ok {
			t.Fatal("no flow")
		}
		hashes = append(hashes, hash)
	}
	if len(slices.Compact(hashes)) != 1 {
		t.Errorf("%x", hashes)
	}
}

func TestFlowsAreDistinguished(t *testing.T) {
	table := flows{seed: 42}
	seen := map[uint64]spec{}
	var streams [Streams]int
	for _, v6 := range []bool{false, true} {
		for _, proto := range []uint8{packet.ProtoTCP, packet.ProtoUDP} {
			for port := range uint16(500) {
				s := spec{v6: v6, proto: proto, sport: 40000 + port, dport: 80}
				p := s.bytes()[packet.VirtioLen:]
				h, err := packet.Parse(p)
				if err != nil {
					t.Fatal(err)
				}
				hash, _ := table.hash(&h, p)
				if other, taken := seen[hash]; taken {
					t.Errorf("%+v and %+v have the same hash", s, other)
				}
				seen[hash] = s
				streams[bulkStream(hash)]++
			}
		}
	}
	for i, n := range streams {
		if i == 0 && n != 0 || i > 0 && (n < 550 || n > 780) {
			t.Errorf("stream %d has %d of 2000 flows", i, n)
		}
	}
}

// With more flows than the table holds, it keeps the busy ones.
func TestBusyFlowsAreRemembered(t *testing.T) {
	table := new(flows)
	busy := mix(1<<40, 0)
	table.find(busy, 0).count = 50000
	for i := range uint64(20000) {
		table.find(mix(i, 2), 0).count = 100
	}
	if got := table.find(busy, 0).count; got != 50000 {
		t.Errorf("the busy flow's count is %d", got)
	}
}

func TestSparseDoesNotWaitForBulk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		for i := 1; i < Streams; i++ {
			r.streams[i].gate = make(chan struct{})
		}
		r.run()
		defer r.end()
		for range 30 {
			r.send(bulkFlow)
		}
		r.counts()
		r.send(sparseFlow)
		if got := r.counts(); got != [Streams]int{0: 1} {
			t.Error(got)
		}
	})
}

func TestSmallFramesShareAWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		gate := make(chan struct{})
		r.streams[0].gate = gate
		r.run()
		defer r.end()
		var want [][]byte
		for i := range 1001 {
			s := spec{payload: 100, sport: uint16(i)}
			want = append(want, s.bytes())
			r.send(s)
			if i == 0 {
				synctest.Wait() // the first is being written alone
			}
		}
		writes := 0
		for ; r.Stats().Packets < 1001; writes++ {
			gate <- struct{}{}
			synctest.Wait()
		}
		if got := r.streams[0].frames(t); !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("%d frames of %d, or others", len(got), len(want))
		}
		if most := 2 + 1001*len(wire(want[0]))/(60<<10); writes > most {
			t.Errorf("%d writes, want at most %d", writes, most)
		}
	})
}

func TestFullQueueDrops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true, Limit: 10 * bulkFrame})
		bulk := r.streamOf(bulkFlow)
		r.streams[bulk].gate = make(chan struct{})
		r.run()
		defer r.end()
		r.send(bulkFlow) // through stream 0
		synctest.Wait()
		r.send(bulkFlow) // being written
		synctest.Wait()
		for range 13 {
			r.send(bulkFlow)
		}
		if got := r.Stats(); got.Dropped != 3 || got.Queued != 10*bulkFrame || got.Packets != 1 {
			t.Errorf("%+v", got)
		}
		for range 11 {
			r.streams[bulk].gate <- struct{}{}
		}
		synctest.Wait()
		if got := r.Stats(); got != (SenderStats{Packets: 12, Bytes: uint64(12 * bulkFrame), Dropped: 3}) {
			t.Errorf("%+v", got)
		}
	})
}

// On a slow path a queue of more than slack takes only as much as leaves it within maxWait.
func TestOldQueueDrops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bulk := newStalledRig(t)
		r.run()
		defer r.end()
		r.send(bulkFlow)
		synctest.Wait()
		leave := func() {
			t.Helper()
			time.Sleep(maxWait - time.Millisecond)
			r.streams[bulk].gate <- struct{}{}
			synctest.Wait()
		}
		want := func(queued, dropped int) {
			t.Helper()
			if got := r.Stats(); got.Queued != queued*bulkFrame || got.Dropped != uint64(dropped) {
				t.Fatalf("%+v, want %d frames queued, %d dropped", got, queued, dropped)
			}
		}
		for range 6 { // one is being written
			r.send(bulkFlow)
			synctest.Wait()
		}
		want(5, 0)
		leave()
		want(4, 0)
		r.send(bulkFlow) // the first has waited for a moment less than maxWait
		want(5, 0)
		time.Sleep(2 * time.Millisecond)
		r.send(bulkFlow)
		want(5, 1)
		for range 3 {
			leave()
		}
		want(2, 1)
		r.send(bulkFlow) // within slack
		want(3, 1)
		r.send(bulkFlow) // the first frame is the one sent just before maxWait
		want(3, 2)
		for range 3 {
			leave()
		}
		r.send(bulkFlow)
		want(1, 2)
		close(r.streams[bulk].gate)
	})
}

// A stalled path is not a slow one: the sender keeps the packets of the stall and those right after it, although old
// frames precede them.
func TestStallDropsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bulk := newStalledRig(t)
		r.run()
		defer r.end()
		r.send(bulkFlow)
		synctest.Wait()
		again, ack := bulkFlow.of(1400), bulkFlow.of(0)
		for range 12 {
			r.send(bulkFlow)
		}
		sent := 12
		for pause := maxWait + time.Millisecond; pause < 10*time.Second; pause *= 2 {
			time.Sleep(pause)
			r.send(again)
			sent++
		}
		time.Sleep(7 * time.Second)
		r.streams[bulk].gate <- struct{}{}
		synctest.Wait()
		r.send(ack)
		close(r.streams[bulk].gate)
		synctest.Wait()
		got := r.streams[bulk].frames(t)
		if n := r.Stats().Dropped; n > 0 || len(got) != sent+1 || !bytes.Equal(got[sent-1], again.bytes()) || !bytes.Equal(got[sent], ack.bytes()) {
			t.Errorf("%d frames of %d were written, %d dropped; or the last two are not the last that were sent", len(got), sent+1, n)
		}
		// It is a path like any other again.
		r.streams[bulk].gate = make(chan struct{})
		for range 4 {
			r.send(bulkFlow)
		}
		synctest.Wait()
		if got := r.Stats(); got.Queued != 3*bulkFrame {
			t.Errorf("%+v", got)
		}
		close(r.streams[bulk].gate)
	})
}

// marked is a packet stream that implements Marks.
type marked struct {
	*memStream
	written, arrived atomic.Uint64
}

func (m *marked) Write(b []byte) (int, error) {
	n, err := m.memStream.Write(b)
	m.written.Add(uint64(n))
	return n, err
}

func (m *marked) Mark() uint64             { return m.written.Load() }
func (m *marked) Arrived(mark uint64) bool { return m.arrived.Load() >= mark }

// A flow that sends little again leaves its bulk stream once the other end has received the flow's earlier frames, even
// if other flows fill that stream.
func TestFlowWaitsForItsArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		streams := [Streams]*marked{}
		for i := range streams {
			streams[i] = &marked{memStream: newMemStream()}
		}
		r := newRig(t, SenderConfig{GSO: true, Open: func(_ context.Context, stream int) (io.WriteCloser, error) { return streams[stream], nil }})
		for i := range streams {
			r.streams[i] = streams[i].memStream
		}
		r.run()
		defer r.end()
		bulk := r.streamOf(bulkFlow)
		small := bulkFlow.of(10)
		other := bulkFlow
		for other.sport = 100; r.streamOf(other) != bulk; other.sport++ {
		}
		r.send(bulkFlow)
		r.want(0, 1)
		streams[0].arrived.Store(streams[0].written.Load())
		r.send(bulkFlow)
		r.want(bulk, 1)
		time.Sleep(time.Hour)
		r.send(small) // asks for a mark
		r.want(bulk, 1)
		time.Sleep(time.Hour)
		there := streams[bulk].written.Load()
		for range 3 {
			r.send(other)
		}
		if got := r.counts(); got[bulk] != 2 {
			t.Fatal(got)
		}
		r.send(small)
		r.want(bulk, 1)
		streams[bulk].arrived.Store(there) // but not the later bytes
		r.send(small)
		r.want(bulk, 1)
		streams[bulk].arrived.Store(streams[bulk].written.Load())
		r.send(small)
		r.want(0, 1)
	})
}

func TestSendBeforeAndAfterRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		r.send(sparseFlow)
		r.send(sparseFlow)
		r.run()
		if got := r.counts(); got != [Streams]int{0: 2} {
			t.Error(got)
		}
		r.end()
		if !r.streams[0].isClosed() || r.streams[1].isClosed() {
			t.Error("Run does not close the streams that Open returned")
		}
		r.send(sparseFlow)
		bad := frame(sparseFlow.bytes())
		bad.Buffer()[packet.VirtioLen] = 0
		r.Send(bad)
		if got := r.Stats(); got.Dropped != 1 || got.Malformed != 1 || got.Queued != 0 {
			t.Errorf("%+v", got)
		}
	})
}

func TestRunEndsABlockedWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		r.streams[0].gate = make(chan struct{})
		r.run()
		r.send(sparseFlow)
		synctest.Wait()
		r.send(sparseFlow)
		r.end()
		if got := r.Stats(); got.Dropped != 2 || got.Queued != 0 {
			t.Errorf("%+v", got)
		}
	})
}

func TestOpenIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		r.refuse(errors.New("no session"))
		r.run()
		defer r.end()
		time.Sleep(time.Hour)
		synctest.Wait()
		if r.opened != [Streams]int{} {
			t.Fatalf("opened without need: %v", r.opened)
		}
		r.send(sparseFlow)
		synctest.Wait()
		if got := r.Stats(); r.opened != [Streams]int{0: 1} || got.Dropped != 1 || got.Broken != 1 {
			t.Fatalf("opened %v, %+v", r.opened, got)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if r.opened != [Streams]int{0: 1} {
			t.Fatalf("opened without need: %v", r.opened)
		}
		// While frames wait, the Sender opens the stream again after growing pauses.
		began := time.Now()
		for time.Since(began) < time.Minute {
			r.send(sparseFlow)
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if n := r.opened[0]; n < 1+60*1000/2000 || n > 75 {
			t.Errorf("opened %d times in a minute", n)
		}
		r.refuse(nil)
		time.Sleep(maxPause)
		before := r.streams[0].frames(t)
		r.send(sparseFlow)
		if got := r.counts(); got != [Streams]int{0: 1} || len(before) == 0 {
			t.Errorf("%v, %d before", got, len(before))
		}
	})
}

func TestBrokenStreamIsReplaced(t *testing.T) {
	for _, how := range []string{"write", "gone"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, SenderConfig{GSO: true})
				r.run()
				defer r.end()
				r.send(sparseFlow)
				old := r.streams[0]
				r.counts()
				time.Sleep(time.Minute)
				r.streams[0] = newMemStream()
				lost := uint64(0)
				if how == "write" {
					old.fail(io.ErrClosedPipe)
					r.send(sparseFlow)
					lost = 1
				} else {
					close(old.gone)
				}
				synctest.Wait()
				if got := r.Stats(); !old.isClosed() || got.Broken != 1 || got.Dropped != lost {
					t.Fatalf("%+v", got)
				}
				r.send(sparseFlow)
				time.Sleep(minPause)
				if got := r.counts(); got != [Streams]int{0: 1} {
					t.Error(got)
				}
			})
		})
	}
}

func TestEagerKeepsAllStreamsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true, Eager: true})
		r.run()
		defer r.end()
		synctest.Wait()
		if r.opened != [Streams]int{1, 1, 1, 1} {
			t.Fatalf("opened %v", r.opened)
		}
		time.Sleep(time.Minute)
		old := r.streams[2]
		r.streams[2] = newMemStream()
		close(old.gone)
		time.Sleep(minPause)
		synctest.Wait()
		if r.opened != [Streams]int{1, 1, 2, 1} {
			t.Fatalf("opened %v", r.opened)
		}
	})
}

func TestRenewOpensTheStreamAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true})
		r.run()
		defer r.end()
		r.send(sparseFlow)
		r.counts()
		old := r.streams[0]
		r.streams[0] = newMemStream()
		r.Renew(0)
		r.Renew(1)
		synctest.Wait()
		if r.opened != [Streams]int{0: 1} {
			t.Errorf("opened %v before there is a frame", r.opened)
		}
		r.send(sparseFlow)
		if got := r.counts(); got != [Streams]int{0: 1} || old.isClosed() || r.Stats().Broken != 0 {
			t.Errorf("%v, closed %v, %+v", got, old.isClosed(), r.Stats())
		}
		old.Close()

		// Renew ends a pause too.
		r.streams[0].fail(io.ErrClosedPipe)
		r.send(sparseFlow)
		synctest.Wait()
		r.streams[0] = newMemStream()
		r.Renew(0)
		r.send(sparseFlow)
		if got := r.counts(); got != [Streams]int{0: 1} {
			t.Errorf("%v", got)
		}
	})
}

// An end without offload receives packets as they are on a wire.
func TestSenderFinishesPacketsWithoutGSO(t *testing.T) {
	for name, s := range map[string]spec{
		"plain":          {payload: 10},
		"partial_udp":    {proto: packet.ProtoUDP, payload: 1001, partial: true},
		"partial_tcp6":   {v6: true, payload: 999, partial: true},
		"super4":         {payload: 65483, gso: 1448, options: 12, id: 0xfff0, seq: 1<<32 - 5, flags: 0x89},
		"super6":         {v6: true, payload: 65475, gso: 1400, flags: 0x89},
		"small_segments": {payload: 30000, gso: 16},
		"exact_multiple": {payload: 14000, gso: 1400, flags: 0x09},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, SenderConfig{})
				r.run()
				defer r.end()
				r.send(s)
				synctest.Wait()
				var got [][]byte
				for _, stream := range r.streams {
					got = append(got, stream.frames(t)...)
				}
				n := 1
				if s.gso > 0 {
					n = (s.payload + s.gso - 1) / s.gso
				}
				if len(got) != n || r.Stats().Packets != uint64(n) {
					t.Fatalf("%d packets, %+v; want %d", len(got), r.Stats(), n)
				}
				original := s.bytes()
				payload := original[len(original)-s.payload:]
				for i, b := range got {
					if !bytes.Equal(b[:packet.VirtioLen], make([]byte, packet.VirtioLen)) {
						t.Fatalf("work is left: %x", b[:packet.VirtioLen])
					}
					h, err := packet.Parse(b[packet.VirtioLen:])
					if err != nil {
						t.Fatal(err)
					}
					ip, transport := b[packet.VirtioLen:][:h.HeaderLen], b[packet.VirtioLen+h.HeaderLen:]
					if sum := packet.PseudoHeader(h.Proto, h.Src, h.Dst, len(transport)); packet.Checksum(transport, sum) != 0xffff {
						t.Fatalf("packet %d: checksum", i)
					}
					if h.Version == 4 && packet.Checksum(ip, 0) != 0xffff {
						t.Fatalf("packet %d: checksum of the header", i)
					}
					if s.gso == 0 {
						continue
					}
					data := transport[20+s.options:]
					if !bytes.HasPrefix(payload, data) || i < n-1 && len(data) != s.gso {
						t.Fatalf("packet %d: %d bytes of payload, or others", i, len(data))
					}
					payload = payload[len(data):]
					flags := s.flags | 0x10
					if i > 0 {
						flags &^= 0x80
					}
					if i < n-1 {
						flags &^= 0x09
					}
					if h.Version == 4 && h.ID != uint32(s.id+uint16(i)) || transport[13] != flags {
						t.Errorf("packet %d: id %#x, flags %#x", i, h.ID, transport[13])
					}
				}
				if s.gso > 0 && len(payload) != 0 {
					t.Errorf("%d bytes are missing", len(payload))
				}
			})
		})
	}
}

// Many goroutines send while streams break and are renewed; every packet is written or counted as dropped.
func TestEveryPacketIsAccountedFor(t *testing.T) {
	var received, malformed atomic.Uint64
	var wg sync.WaitGroup
	var mu sync.Mutex
	opened := 0
	var ends []io.Closer // a caller of Renew closes the stream that it replaces
	arrived := make(chan struct{}, 1)
	s := NewSender(SenderConfig{Limit: 256 << 10, Open: func(_ context.Context, stream int) (io.WriteCloser, error) {
		mu.Lock()
		defer mu.Unlock()
		opened++
		if opened%5 == 0 {
			return nil, errors.New("not yet")
		}
		here, there := net.Pipe()
		ends = append(ends, here)
		wg.Go(func() {
			defer there.Close()
			if err := Receive(there, 0, new(Barriers), DeliverFunc(func(f *Frame) {
				received.Add(1)
				f.Release()
				select {
				case arrived <- struct{}{}:
				default:
				}
			}), &malformed); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("Receive: %v", err)
			}
		})
		return here, nil
	}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { s.Run(ctx); close(ended) }()
	var senders sync.WaitGroup
	const each = 400
	for i := range 4 {
		senders.Go(func() {
			for j := range each {
				f := spec{payload: 1000 + j, sport: uint16(i), proto: []uint8{packet.ProtoTCP, packet.ProtoUDP}[i%2], partial: true}
				s.Send(frame(f.bytes()))
				if j%97 == 0 {
					s.Renew(i)
				}
				s.Stats()
			}
		})
	}
	senders.Wait()
	<-arrived
	cancel()
	<-ended
	for _, end := range ends {
		end.Close()
	}
	wg.Wait()
	got := s.Stats()
	if got.Packets+got.Dropped != 4*each || got.Malformed != 0 || malformed.Load() != 0 || got.Packets == 0 || received.Load() < got.Packets {
		t.Errorf("%+v, %d received, %d malformed", got, received.Load(), malformed.Load())
	}
}

// Bare acknowledgements wait for each other, at most a millisecond. Other packets do not wait, and end their wait.
func TestOnlyBareAcknowledgementsWait(t *testing.T) {
	acks := []spec{{sport: 5}, {sport: 5, options: 12}, {sport: 6, v6: true}}
	others := map[string]spec{
		"data":     {sport: 5, payload: 1},
		"syn":      {sport: 5, flags: 0x02},
		"fin":      {sport: 5, flags: 0x01},
		"rst":      {sport: 5, flags: 0x04},
		"push":     {sport: 5, flags: 0x08},
		"datagram": {sport: 5, proto: packet.ProtoUDP},
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true, Eager: true})
		r.run()
		defer r.end()
		want := func(frames int) {
			t.Helper()
			if got := r.counts(); got != [Streams]int{0: frames} {
				t.Fatalf("frames by stream: %v, want %d in stream 0", got, frames)
			}
		}
		synctest.Wait()
		time.Sleep(time.Second)
		r.send(acks[0])
		want(1) // the first goes at once
		for _, a := range acks {
			time.Sleep(ackPause / 4)
			r.send(a)
			want(0)
		}
		time.Sleep(ackPause / 4)
		want(3)
		for name, other := range others {
			r.send(acks[0])
			want(0)
			r.send(other)
			if got := r.counts(); got != [Streams]int{0: 2} {
				t.Fatalf("%s: frames by stream: %v, want 2 in stream 0", name, got)
			}
		}
		time.Sleep(time.Second)
		want(0)
		r.send(acks[0])
		want(1)
	})
}

// Datagrams of a bulk flow wait for each other, at most a millisecond or until there are 16 KiB.
func TestBulkDatagramsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, SenderConfig{GSO: true, Eager: true})
		r.run()
		defer r.end()
		flow := spec{proto: packet.ProtoUDP, partial: true, sport: 5, payload: 1200}
		bulk := r.streamOf(flow)
		for range 2 * bulkBytes / flow.payload {
			r.send(flow)
		}
		time.Sleep(2 * ackPause)
		if got := r.counts(); got[bulk] == 0 {
			t.Fatalf("frames by stream: %v, want some in stream %d", got, bulk)
		}
		r.send(flow)
		r.want(bulk, 1) // the first goes at once
		time.Sleep(ackPause / 4)
		for range 5 {
			r.send(flow)
		}
		r.want(bulk, 0)
		time.Sleep(ackPause)
		r.want(bulk, 5)
		r.send(flow)
		r.want(bulk, 0)
		for range gatherBytes / flow.payload {
			r.send(flow)
		}
		if got := r.counts()[bulk]; got < gatherBytes/flow.payload {
			t.Errorf("%d frames, want all of them", got)
		}
	})
}
