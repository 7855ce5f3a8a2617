package transport

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// hostile is the session of a peer.
var hostile = SessionID{7}

// peer writes frames by itself, as no honest end would.
type peer struct {
	t      *testing.T
	conn   net.Conn
	out    *bufio.Writer
	resets atomic.Int64
}

// newPeer attaches the first link of a session. It reads all frames, counts RESET, and acknowledges nothing.
func newPeer(t *testing.T, conn net.Conn) *peer {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(marshalHandshake(hello{Session: hostile, Flags: flagFirst, Attempt: 1})); err != nil {
		t.Fatal(err)
	}
	if r, err := readHandshake[reply](conn); err != nil || r.Status != statusOK {
		t.Fatal(r, err)
	}
	p := &peer{t: t, conn: conn, out: bufio.NewWriterSize(conn, 256<<10)}
	var reading sync.WaitGroup
	reading.Go(p.read)
	t.Cleanup(func() { conn.Close(); reading.Wait() })
	return p
}

func (p *peer) read() {
	in := bufio.NewReader(p.conn)
	var b [headerLen]byte
	for {
		if _, err := io.ReadFull(in, b[:]); err != nil {
			return
		}
		h, err := parseHeader(&b)
		if err != nil {
			p.t.Error(err)
			return
		}
		if h.kind == frameReset {
			p.resets.Add(1)
		}
		if _, err := in.Discard(h.length); err != nil {
			return
		}
	}
}

func (p *peer) frame(kind byte, stream uint32, payload ...byte) {
	p.t.Helper()
	var b [headerLen]byte
	putHeader(&b, header{kind: kind, length: len(payload), stream: stream})
	p.out.Write(b[:]) // a bufio.Writer keeps its error
	if _, err := p.out.Write(payload); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) flush() {
	p.t.Helper()
	if err := p.out.Flush(); err != nil {
		p.t.Fatal(err)
	}
}

// liveHeap returns the bytes of live objects after a garbage collection.
func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // the second collection empties the pools
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// hostileRig is a server with a budget, a session that echoes for an honest laptop, and dials for hostile ones.
type hostileRig struct {
	t      *testing.T
	dial   func() net.Conn
	budget *Budget
	honest *Session
}

// newHostileRig hands each session of a hostile peer to handle.
func newHostileRig(t *testing.T, b *Budget, handle func(context.Context, *Session)) *hostileRig {
	t.Helper()
	r := &hostileRig{t: t, budget: b}
	echo := func(ctx context.Context, s *Session) {
		for {
			in, err := s.Accept(ctx)
			if err != nil {
				return
			}
			go func() {
				if st, err := in.Accept(); err == nil {
					io.Copy(st, st)
					st.Close()
				}
			}()
		}
	}
	r.dial = runServer(t, ServerConfig{Budget: b, OnSession: func(ctx context.Context, s *Session) {
		if s.id == hostile {
			handle(ctx, s)
			return
		}
		echo(ctx, s)
	}})
	sessions := make(chan *Session, 1)
	client := NewClient(ClientConfig{
		Dial:      func(context.Context) (net.Conn, error) { return r.dial(), nil },
		Links:     1,
		OnSession: func(_ context.Context, s *Session) { sessions <- s },
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	r.honest = <-sessions
	return r
}

// works sends size bytes through a new stream of the honest laptop and back.
func (r *hostileRig) works(size int) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	st, err := r.honest.Open(ctx, Request{Proto: ProtoTCP})
	if err != nil {
		r.t.Fatalf("an honest laptop cannot open a stream: %v", err)
	}
	defer st.Close()
	go func() {
		st.Write(make([]byte, size))
		st.CloseWrite()
	}()
	if n, err := io.Copy(io.Discard, st); err != nil || n != int64(size) {
		r.t.Errorf("an honest laptop gets %d of %d bytes back, %v", n, size, err)
	}
}

// A peer that opens 200 000 streams with data in each gets its part of the budget, and no more. The others work.
func TestPeerThatOpensTooManyStreamsStaysWithinBudget(t *testing.T) {
	const streams, places, bytes = 200_000, 4096, 64 << 20
	for _, test := range []struct {
		name   string
		reset  bool // each stream right after its OPEN
		accept bool
	}{
		{name: "that are not accepted"},
		{name: "that are accepted and not read", accept: true},
		{name: "and resets them at once", reset: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			ended := make(chan struct{})
			r := newHostileRig(t, NewBudget(places, bytes), func(ctx context.Context, s *Session) {
				defer close(ended)
				var accepted []*Packets
				for test.accept {
					in, err := s.Accept(ctx)
					if err != nil {
						break
					}
					if p, err := in.AcceptPackets(); err == nil {
						accepted = append(accepted, p)
					}
				}
				<-ctx.Done()
				for _, p := range accepted {
					p.Close()
				}
			})
			before := liveHeap()
			p := newPeer(t, r.dial())
			request := appendRequest(nil, Request{Proto: ProtoUDP}, true)
			data := make([]byte, 8<<10)
			for i := range uint32(streams) {
				p.frame(frameOpen, 2*i+1, request...)
				if test.reset {
					p.frame(frameReset, 2*i+1)
				} else {
					p.frame(frameData, 2*i+1, data[:1+i%uint32(len(data))]...)
				}
				if i%50_000 == 0 {
					p.flush()
					r.works(100 << 10)
				}
			}
			p.flush()
			testenv.Until(t, "the server has refused the rest", func() bool { return p.resets.Load() >= streams-places/2 })
			used, held := r.budget.Used()
			grown := liveHeap() - before
			t.Logf("%d streams opened, %d refused, %d streams and %d kB held, heap grown by %d kB", streams, p.resets.Load(), used, held>>10, grown>>10)
			if used > places/2 || held > bytes/2+1<<20 {
				t.Errorf("one peer holds %d streams and %d bytes of a budget of %d and %d", used, held, places, bytes)
			}
			if most := int64(bytes/2 + places/2*8<<10 + 16<<20); grown > most {
				t.Errorf("the heap has grown by %d bytes, more than %d", grown, most)
			}
			r.works(1 << 20)
			p.conn.Close()
		})
	}
}

// A peer whose streams nobody reads loses the streams for which more data arrives. Other sessions lose none.
func TestPeerThatFillsBuffersStaysWithinBudget(t *testing.T) {
	const bytes = 32 << 20
	r := newHostileRig(t, NewBudget(1<<16, bytes), func(ctx context.Context, s *Session) {
		for {
			in, err := s.Accept(ctx)
			if err != nil {
				return
			}
			p, err := in.AcceptPackets()
			if err == nil {
				defer p.Close()
			}
		}
	})
	p := newPeer(t, r.dial())
	request := appendRequest(nil, Request{Proto: ProtoUDP}, true)
	const streams = 2000 // with windows of 500 MB
	for i := range uint32(streams) {
		p.frame(frameOpen, 2*i+1, request...)
	}
	for range 7 {
		for i := range uint32(streams) {
			p.frame(frameData, 2*i+1, make([]byte, 32<<10)...)
		}
		p.flush()
		r.works(100 << 10)
	}
	testenv.Until(t, "streams are reset", func() bool { return p.resets.Load() > streams/2 })
	if _, held := r.budget.Used(); held > bytes/2+1<<20 {
		t.Errorf("one peer holds %d bytes of a budget of %d", held, bytes)
	}
	r.works(1 << 20)
}

// The budget also bounds the data that is sent to a peer that acknowledges nothing.
func TestPeerThatAcknowledgesNothingStaysWithinBudget(t *testing.T) {
	const bytes = 4 << 20
	r := newHostileRig(t, NewBudget(1<<16, bytes), func(ctx context.Context, s *Session) {
		var writers sync.WaitGroup
		defer writers.Wait()
		for {
			in, err := s.Accept(ctx)
			if err != nil {
				return
			}
			writers.Go(func() {
				if st, err := in.Accept(); err == nil {
					st.Write(make([]byte, 1<<20))
					st.Close()
				}
			})
		}
	})
	p := newPeer(t, r.dial())
	for i := range uint32(100) { // 256 KiB of window each
		p.frame(frameOpen, 2*i+1, appendRequest(nil, Request{Proto: ProtoTCP}, false)...)
	}
	p.flush()
	testenv.Until(t, "the budget is used", func() bool { _, held := r.budget.Used(); return held > bytes/4 })
	r.works(1 << 20)
	if _, held := r.budget.Used(); held > bytes/2+1<<20 {
		t.Errorf("one peer makes the server hold %d bytes of a budget of %d", held, bytes)
	}
}

// Ended streams return all their places and bytes to the budget, however they end.
func TestEndedStreamsLeaveTheBudgetEmpty(t *testing.T) {
	r := newHostileRig(t, NewBudget(100, 64<<20), nil)
	for i := range 300 { // more than there are places
		st, err := r.honest.Open(t.Context(), Request{Proto: ProtoTCP})
		if err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
		st.Write(make([]byte, 100<<10))
		switch i % 3 {
		case 0:
			st.Reset()
		case 1:
			st.Close()
		case 2:
			st.CloseWrite()
			io.Copy(io.Discard, st)
			st.Close()
		}
		testenv.Until(t, "there is a place", func() bool { n, _ := r.budget.Used(); return n < 40 })
	}
	testenv.Until(t, "nothing is held", func() bool {
		streams, held := r.budget.Used()
		return streams == 0 && held <= 2*largeChunk // frames of the link itself may wait for their acknowledgement
	})
}

// A client without a Budget resets each stream that the manager opens, and keeps nothing of it.
func TestClientRejectsStreamsOfTheManager(t *testing.T) {
	opened := make(chan error, 1)
	near, far := net.Pipe()
	defer far.Close()
	sessions := make(chan *Session, 1)
	client := NewClient(ClientConfig{
		Links:     1,
		Dial:      func(context.Context) (net.Conn, error) { return near, nil },
		OnSession: func(_ context.Context, s *Session) { sessions <- s },
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	defer func() { cancel(); far.Close(); <-done }()
	if _, err := readHandshake[hello](far); err != nil {
		t.Fatal(err)
	}
	go func() { opened <- writeAll(far, marshalHandshake(reply{Status: statusOK})) }()
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	laptop := <-sessions
	p := &peer{t: t, conn: far, out: bufio.NewWriter(far)}
	var reading sync.WaitGroup
	reading.Go(p.read)
	defer reading.Wait()
	defer far.Close()
	const streams = 10_000
	for i := uint32(2); i < 2+2*streams; i += 2 {
		p.frame(frameOpen, i, appendRequest(nil, Request{Proto: Proto(i % 20)}, i%4 == 0)...)
		p.frame(frameData, i, make([]byte, 1000)...)
	}
	p.flush()
	testenv.Until(t, "all are reset", func() bool { return p.resets.Load() == streams })
	if n := laptop.Stats().Streams; n != 0 {
		t.Errorf("the laptop keeps %d streams", n)
	}
	laptop.mu.Lock()
	defer laptop.mu.Unlock()
	if n := len(laptop.arrived); n != 0 {
		t.Errorf("%d streams wait for Accept", n)
	}
}

func writeAll(c net.Conn, b []byte) error { _, err := c.Write(b); return err }

// The opener of a stream that is refused learns that at once.
func TestRefusedStreamIsResetForItsOpener(t *testing.T) {
	r := newHostileRig(t, NewBudget(4, 64<<20), nil)
	var open []*Stream
	for range 2 {
		st, err := r.honest.Open(t.Context(), Request{Proto: ProtoTCP})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, st)
	}
	if st, err := r.honest.Open(t.Context(), Request{Proto: ProtoTCP}); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a stream beyond the budget gives %v, %v", st, err)
	}
	for _, st := range open { // open streams continue
		if err := binary.Write(st, binary.BigEndian, uint32(7)); err != nil {
			t.Error(err)
		}
		var got uint32
		if err := binary.Read(st, binary.BigEndian, &got); err != nil || got != 7 {
			t.Errorf("read %d, %v", got, err)
		}
		st.Close()
	}
}
