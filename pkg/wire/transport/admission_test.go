package transport

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/testenv"
)

// crowd is a server that admits a session once its laptop has sent it a byte, for the user that the first byte of its
// ID names.
type crowd struct {
	t      *testing.T
	server *Server
	l      net.Listener
	count  uint64
	admits chan error
}

func newCrowd(t *testing.T, cfg ServerConfig) *crowd {
	t.Helper()
	c := &crowd{t: t, l: localListener(t), admits: make(chan error, 4096)}
	cfg.Admission = true
	cfg.OnSession = func(ctx context.Context, s *Session) {
		if s.id[0] != 0 {
			c.admits <- s.Admit(string(s.id[:1]))
		}
		<-ctx.Done()
	}
	c.server = NewServer(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.server.Serve(ctx, c.l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return c
}

// session begins a session of a user, 0: one that is never admitted. The caller closes the conn.
func (c *crowd) session(user byte) (SessionID, net.Conn) {
	c.t.Helper()
	conn := c.dial()
	c.count++
	h := hello{Session: SessionID{user}, Flags: flagFirst, Attempt: 1}
	binary.BigEndian.PutUint64(h.Session[8:], c.count)
	if _, err := conn.Write(marshalHandshake(h)); err != nil {
		c.t.Fatal(err)
	}
	if r, err := readHandshake[reply](conn); err != nil || r.Status != statusOK {
		c.t.Fatalf("session %d: status %d, %v", c.count, r.Status, err)
	}
	if user != 0 {
		if err := <-c.admits; err != nil {
			c.t.Fatalf("session %d of user %d: %v", c.count, user, err)
		}
	}
	return h.Session, conn
}

func (c *crowd) dial() net.Conn {
	c.t.Helper()
	conn, err := net.Dial("tcp", c.l.Addr().String())
	if err != nil {
		c.t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(time.Minute))
	c.t.Cleanup(func() { conn.Close() })
	return conn
}

// has reports whether the server knows the session.
func (c *crowd) has(id SessionID) bool {
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	return c.server.sessions[id] != nil
}

func (c *crowd) detached(id SessionID) {
	c.t.Helper()
	testenv.Until(c.t, "the conn's end is known", func() bool {
		c.server.mu.Lock()
		s := c.server.sessions[id]
		c.server.mu.Unlock()
		return s == nil || !s.Attached()
	})
}

// Sessions that are begun and left alone neither keep a laptop out nor end one whose first words take their time.
func TestAbandonedSessionsDoNotLockOutOthers(t *testing.T) {
	c := newCrowd(t, ServerConfig{MaxSessions: 64})
	slow, _ := c.session(0)
	old, conn := c.session(1)
	conn.Close()
	c.detached(old)
	for range 20 * 64 {
		id, conn := c.session(0)
		conn.Close()
		c.detached(id)
	}
	if !c.has(slow) {
		t.Error("the session of a slow laptop, which has a conn, has ended")
	}
	if !c.has(old) {
		t.Error("the session of a laptop that is away has ended")
	}
	late, _ := c.session(2)
	if !c.has(late) {
		t.Error("the newcomer's session has ended")
	}
	if n := len(c.server.Sessions()); n > 64+2 {
		t.Errorf("%d sessions", n)
	}
}

// Sessions that have a conn and no user do not keep a laptop out.
func TestPendingSessionsDoNotLockOutOthers(t *testing.T) {
	c := newCrowd(t, ServerConfig{MaxSessions: 16})
	for range 100 {
		c.session(0)
	}
	id, _ := c.session(1)
	c.session(0)
	if !c.has(id) {
		t.Error("the laptop's session has ended")
	}
}

// Beyond the limit, sessions of the user with the most make room for others.
func TestSessionsOfOneUserDoNotLockOutOthers(t *testing.T) {
	c := newCrowd(t, ServerConfig{MaxSessions: 8})
	quiet, conn := c.session(2)
	conn.Close()
	c.detached(quiet)
	first, _ := c.session(1)
	second, conn := c.session(1)
	conn.Close()
	c.detached(second)
	for range 20 {
		c.session(1)
	}
	if c.has(first) || c.has(second) || !c.has(quiet) {
		t.Errorf("of the user with many sessions, the first ones are there: %v, %v; the other's: %v",
			c.has(first), c.has(second), c.has(quiet))
	}
	for user := byte(3); user < 9; user++ {
		c.session(user)
	}
	if !c.has(quiet) {
		t.Error("the session of another user has ended")
	}
	c.session(9) // each of eight users has one session: that without a conn makes room
	if c.has(quiet) {
		t.Error("a session without a conn did not make room")
	}
	// Each of eight users has one session with a conn.
	h := hello{Session: SessionID{10}, Flags: flagFirst, Attempt: 1}
	if status, err := sendHello(t, c.l, h); err != nil || status != statusFull {
		t.Errorf("a ninth user got status %d, %v", status, err)
	}
}

// The sessions of one user have one part of the budget, and those of others have theirs.
func TestSessionsOfOneUserShareTheirPart(t *testing.T) {
	c := newCrowd(t, ServerConfig{Budget: NewBudget(8, 1<<20)})
	of := func(user byte) *Session {
		id, _ := c.session(user)
		c.server.mu.Lock()
		defer c.server.mu.Unlock()
		return c.server.sessions[id]
	}
	one, two, other := of(1), of(1), of(2)
	places, bytes := two.places.held(), two.bytes.held()
	one.places.add(2)
	one.bytes.add(1000)
	if two.places.held() != places+2 || two.bytes.held() != bytes+1000 || other.places.held() != 0 || other.bytes.held() != 0 {
		t.Errorf("the user's other session holds %d places and %d bytes, another user's %d and %d", two.places.held(),
			two.bytes.held(), other.places.held(), other.bytes.held())
	}
	if two.places.fits(3) || !other.places.fits(3) {
		t.Error("a second session of the user has a part of its own, or another user has none")
	}
	one.places.add(-2)
	one.bytes.add(-1000)
}

// Conns that say nothing neither keep others out nor, below their limit, end the handshake of a slow laptop.
func TestSilentConnsDoNotLockOutOthers(t *testing.T) {
	const room = 32
	c := newCrowd(t, ServerConfig{MaxHandshakes: room})
	for range 10 * room {
		c.dial()
	}
	slow := c.dial()
	for range room - 1 {
		c.dial()
	}
	testenv.Until(t, "the handshakes are bounded", func() bool { return c.server.handshakes.Len() == room })
	if _, err := slow.Write(marshalHandshake(hello{Session: SessionID{0, 1}, Flags: flagFirst, Attempt: 1})); err != nil {
		t.Fatal(err)
	}
	if r, err := readHandshake[reply](slow); err != nil || r.Status != statusOK {
		t.Errorf("a slow laptop got status %d, %v", r.Status, err)
	}
	c.session(1)
}

// pipes is a listener for net.Pipe.
type pipes struct {
	conns  chan net.Conn
	closed context.Context
	close  func()
}

func (p pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.closed.Done():
		return nil, net.ErrClosed
	}
}

func (p pipes) Close() error {
	p.close()
	return nil
}

func (p pipes) Addr() net.Addr { return &net.UnixAddr{} }

func (p pipes) dial(ctx context.Context) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case p.conns <- far:
		return near, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// A session that nobody admits ends after a minute, and after 15 s without a conn. An admitted one has all its grace.
func TestPendingSessionEnds(t *testing.T) {
	for _, test := range []struct {
		name   string
		detach bool
		admit  bool
		after  time.Duration
	}{
		{"with a conn", false, false, time.Minute},
		{"without a conn", true, false, 15 * time.Second},
		{"admitted", true, true, 5 * time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				closed, closes := context.WithCancel(context.Background())
				l := pipes{make(chan net.Conn), closed, closes}
				ended := make(chan struct{})
				server := NewServer(ServerConfig{Admission: true, OnSession: func(ctx context.Context, s *Session) {
					if test.admit {
						if err := s.Admit("alice"); err != nil {
							t.Error(err)
						}
					}
					<-ctx.Done()
					close(ended)
				}})
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error, 1)
				go func() { done <- server.Serve(ctx, l) }()
				defer func() { cancel(); <-done }()
				if test.detach {
					conn, _ := l.dial(t.Context())
					conn.Write(marshalHandshake(hello{Flags: flagFirst, Attempt: 1}))
					io.ReadFull(conn, make([]byte, 24))
					conn.Close()
				} else {
					client := NewClient(ClientConfig{Links: 1, Dial: l.dial})
					ctx, stop := context.WithCancel(context.Background())
					over := make(chan error, 1)
					go func() { over <- client.Run(ctx) }()
					defer func() { stop(); <-over }()
				}
				began := time.Now()
				<-ended
				if got := time.Since(began); got < test.after || got > test.after+5*time.Second {
					t.Errorf("ended after %s, want %s", got, test.after)
				}
				server.mu.Lock()
				defer server.mu.Unlock()
				if test.admit && len(server.users) > 1 {
					t.Errorf("%d users", len(server.users))
				}
			})
		})
	}
}
