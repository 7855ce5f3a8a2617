package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// stripe is a part of a stream, as the other end sends it.
type stripe struct {
	at   uint64
	data string
}

// place delivers parts of a stream in their order.
func place(l *link, st *Stream, parts []stripe) error {
	for _, part := range parts {
		seg := newSegment(len(part.data))
		seg.w = copy(seg.buf, part.data)
		if err := st.deliver(l, nil, seg, &part.at); err != nil {
			return err
		}
	}
	return nil
}

func stripedStream(t *testing.T) (*link, *Stream) {
	t.Helper()
	l := lonely(t)
	st, err := l.newOutgoing(Request{Proto: ProtoTCP}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.deliver(l, []byte("abc"), nil, nil); err != nil { // a DATA frame
		t.Fatal(err)
	}
	return l, st
}

func TestStripesAreReadInOrder(t *testing.T) {
	for range 50 {
		l, st := stripedStream(t)
		parts := []stripe{{3, "de"}, {5, "f"}, {6, "ghij"}, {10, "k"}}
		rand.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		if err := place(l, st, parts[:2]); err != nil {
			t.Fatal(err)
		}
		if err := st.onStripedFin(11); err != nil { // it overtakes two parts
			t.Fatal(err)
		}
		if err := place(l, st, parts[2:]); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(st)
		if string(got) != "abcdefghijk" || err != nil {
			t.Errorf("%v: read %q, %v", parts, got, err)
		}
		if st.early.size != 0 || st.early.held != 0 {
			t.Errorf("%d bytes are still counted as early", st.early.size)
		}
	}
}

func TestStripesThatDoNotFitAreViolations(t *testing.T) {
	fin := func(length uint64) func(*link, *Stream) error {
		return func(_ *link, st *Stream) error { return st.onStripedFin(length) }
	}
	parts := func(parts ...stripe) func(*link, *Stream) error {
		return func(l *link, st *Stream) error { return place(l, st, parts) }
	}
	both := func(first, second func(*link, *Stream) error) func(*link, *Stream) error {
		return func(l *link, st *Stream) error { return errors.Join(first(l, st), second(l, st)) }
	}
	for _, tt := range []struct {
		name string
		send func(*link, *Stream) error
	}{
		{"of bytes that DATA had", parts(stripe{2, "c"})},
		{"twice", parts(stripe{3, "de"}, stripe{3, "de"})},
		{"overlapping", parts(stripe{5, "fg"}, stripe{4, "ef"}, stripe{3, "d"})},
		{"beyond the window", parts(stripe{1 << 40, string(make([]byte, 64<<10))}, stripe{2 << 40, string(make([]byte, 64<<10))},
			stripe{3 << 40, string(make([]byte, 64<<10))}, stripe{4 << 40, string(make([]byte, 64<<10))})},
		{"behind FIN", both(fin(5), parts(stripe{3, "def"}))},
		{"after the end", both(both(fin(5), parts(stripe{3, "de"})), parts(stripe{5, "f"}))},
		{"before FIN says so", both(parts(stripe{4, "e"}), fin(3))},
		{"FIN twice", both(fin(9), fin(9))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, st := stripedStream(t)
			if err := tt.send(l, st); !errors.Is(err, ErrProtocol) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// What arrived early does not stay in memory when the stream ends before it can be read.
func TestEarlyStripesAreFreed(t *testing.T) {
	for name, end := range map[string]func(*Stream){
		"reset by the other end": func(st *Stream) { st.abort(errPeerReset) },
		"reset":                  func(st *Stream) { st.Reset() },
	} {
		t.Run(name, func(t *testing.T) {
			l, st := stripedStream(t)
			if err := place(l, st, []stripe{{100, "late"}}); err != nil {
				t.Fatal(err)
			}
			end(st)
			if st.early.Len() != 0 || st.early.held != 0 {
				t.Errorf("%d parts are kept", st.early.Len())
			}
			got, _ := io.ReadAll(st)
			if want := map[bool]string{true: "abc"}[name != "reset"]; string(got) != want {
				t.Errorf("read %q, want %q", got, want)
			}
		})
	}
}

// A manager that does not know STRIPE leaves the flag out of its reply, and gets none.
func TestLinksAreForBulkIfBothEndsAgree(t *testing.T) {
	dial := runServer(t, ServerConfig{})
	for link, want := range map[uint8]uint8{0: 0, 1: flagBulk} {
		c := dial()
		id := SessionID{link + 1}
		c.Write(marshalHandshake(hello{Session: id, Flags: flagFirst, Attempt: 1}))
		if r, err := readHandshake[reply](c); err != nil || r.Flags != 0 {
			t.Fatal(r, err)
		}
		c = dial()
		c.Write(marshalHandshake(hello{Session: id, Link: 1, Flags: flagFirst | want, Attempt: 1}))
		if r, err := readHandshake[reply](c); err != nil || r.Status != statusOK || r.Flags != want {
			t.Errorf("flags %d are answered with %+v, %v", want, r, err)
		}
	}

	near, far := net.Pipe()
	s := newSession(identity{client: true}, 2, NewBudget(16, 64<<20), Tuning{}.withDefaults(), NewServer(ServerConfig{}).log)
	defer s.wg.Wait()
	defer s.fail(ErrSessionClosed)
	c := NewClient(ClientConfig{Dial: func(context.Context) (net.Conn, error) { return near, nil }, Links: 2})
	asked := make(chan hello, 1)
	go func() {
		h, _ := readHandshake[hello](far)
		asked <- h
		far.Write(marshalHandshake(reply{Status: statusOK}))
		io.Copy(io.Discard, far)
	}()
	l := s.link(1)
	if _, err := c.attempt(t.Context(), s, l, fallback); err != nil {
		t.Fatal(err)
	}
	if h := <-asked; h.Flags&flagBulk == 0 || l.load.bulk.Load() {
		t.Errorf("the hello has flags %d, and the link is for bulk: %v", h.Flags, l.load.bulk.Load())
	}
}

// On a path that loses packets, something follows a lone message soon, so that TCP notices its loss.
func TestPingsFollowALoneMessageOnALossyPath(t *testing.T) {
	for _, lossy := range []bool{true, false} {
		sessions := make(chan *Session, 1)
		r := newHostileRig(t, NewBudget(16, 64<<20), func(_ context.Context, s *Session) { sessions <- s })
		p := newPeer(t, r.dial())
		l := (<-sessions).link(0)
		l.load.rtt.Store(int64(40 * time.Millisecond))
		if lossy {
			l.delay().lost.Store(time.Now().UnixNano())
		}
		l.mu.Lock()
		before := l.heart.pingSeq
		l.frame(header{kind: frameReset, stream: 7}, nil)
		l.mu.Unlock()
		pings := func() uint64 {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.heart.pingSeq - before
		}
		testenv.Until(t, "the message arrives", func() bool { return p.resets.Load() == 1 })
		if lossy {
			testenv.Until(t, "pings follow", func() bool { return pings() >= 3 })
		} else if n := pings(); n > 0 {
			t.Errorf("%d pings follow on a path that loses nothing", n)
		}
	}
}

func TestPiecesAreTakenByTheirOffset(t *testing.T) {
	var p pieces
	var want []byte
	for _, i := range rand.Perm(1000) {
		seg := newSegment(1)
		seg.buf[0], seg.w = byte(i), 1
		p.add(uint64(i), seg)
	}
	var got []byte
	for i := range uint64(1000) {
		one, ok := p.take(i)
		if !ok || one.at != i {
			t.Fatalf("the piece at %d: %v, %v", i, one, ok)
		}
		got, want = append(got, one.seg.buf[0]), append(want, byte(i))
		one.seg.free()
	}
	if !bytes.Equal(got, want) || p.size != 0 || p.held != 0 {
		t.Errorf("%d bytes are left, %d held", p.size, p.held)
	}
}

// Probes cost a ping in each 10 ms. They are for paths that have a limit.
func TestOnlyFarPathsAreProbed(t *testing.T) {
	for rtt, want := range map[time.Duration]bool{nearby / 2: false, 2 * nearby: true} {
		l := lonely(t)
		l.load.bulk.Store(true)
		l.mu.Lock()
		now := time.Now()
		l.flight.marks = []mark{{l.out.acked, now.Add(-rtt)}}
		l.landed(now)
		d := l.delay()
		l.mu.Unlock()
		d.mu.Lock()
		if probed := !d.asked.IsZero(); probed != want {
			t.Errorf("a path of %v is probed: %v", rtt, probed)
		}
		d.mu.Unlock()
	}
}
