package transport

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
)

// lonely is a link whose other end reads everything and sends nothing.
func lonely(t *testing.T) *link {
	s := newSession(identity{client: true}, 1, NewBudget(16, 64<<20), Tuning{}.withDefaults(), NewServer(ServerConfig{}).log)
	near, far := net.Pipe()
	l := s.link(0)
	if _, err := l.attach(near, fallback, 0); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, far)
	t.Cleanup(func() {
		s.fail(ErrSessionClosed)
		s.wg.Wait()
		far.Close()
	})
	return l
}

// A Write that waits for the window when FIN is sent must not send data after it, also when the window opens
// before it wakes: to the other end that is a violation, which ends the session.
func TestNoDataAfterFIN(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lonely(t)
		st, err := l.newOutgoing(Request{Proto: ProtoTCP}, false)
		if err != nil {
			t.Fatal(err)
		}
		st.credit = 0
		written := make(chan error, 1)
		go func() {
			_, err := st.Write([]byte("late"))
			written <- err
		}()
		synctest.Wait() // until Write waits
		l.mu.Lock()
		st.endWriting(CodeOK)
		st.credit = 100
		st.canWrite.Signal()
		end := l.out.end
		l.mu.Unlock()
		if err := <-written; !errors.Is(err, syscall.EPIPE) {
			t.Errorf("Write gives %v, want EPIPE", err)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.out.end != end {
			t.Errorf("%d bytes were sent after FIN", l.out.end-end)
		}
	})
}

// Data that arrives during Close is unread too: the other end gets a reset, not a FIN.
func TestCloseWhileDataArrives(t *testing.T) {
	l := lonely(t)
	for i := range 200 {
		st, err := l.newOutgoing(Request{Proto: ProtoTCP}, false)
		if err != nil {
			t.Fatal(err)
		}
		delivered := make(chan error, 1)
		go func() { delivered <- st.deliver(l, []byte("x"), nil, nil) }()
		st.Close()
		if err := <-delivered; err != nil {
			t.Fatal(err)
		}
		l.mu.Lock()
		reset := errors.Is(st.writeErr, net.ErrClosed)
		l.mu.Unlock()
		if !reset {
			t.Fatalf("round %d: data was thrown away without a reset", i)
		}
	}
}
