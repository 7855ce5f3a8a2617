package transport

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
)

// ServerConfig configures a Server. All fields have defaults.
type ServerConfig struct {
	// OnSession is called for every new session, in its own goroutine. ctx ends with the session. Returning does
	// not end the session. Serve waits for it.
	OnSession func(ctx context.Context, s *Session)

	// OnRefused is called for each conn that the server rejects, after it is logged and before it is closed. It may be
	// nil.
	OnRefused func(conn net.Conn, reason error)

	// Admission means that a session is pending until Session.Admit. MaxSessions also bounds the pending ones, apart
	// from the others. A new one ends the oldest, at first of those without a conn.
	Admission bool

	Grace         time.Duration // time for which a session without a conn is kept; 5 min
	MaxSessions   int           // 1024
	MaxLinks      int           // links of one session; 16
	MaxHandshakes int           // conns in a handshake; 2048. Beyond it the oldest is closed

	Budget *Budget // shared by all sessions; 32768 streams and 256 MiB

	Tuning Tuning
	Logger *slog.Logger // nil discards
}

// Server serves the sessions of the laptops whose conns it accepts.
type Server struct {
	cfg ServerConfig
	log *slog.Logger

	handshakes authlistener.Bound

	mu       sync.Mutex
	sessions map[SessionID]*Session
	users    map[string]*user
	closing  bool
	wg       sync.WaitGroup
}

// NewServer returns a Server that does nothing before Serve.
func NewServer(cfg ServerConfig) *Server {
	cfg.Grace = cmp.Or(cfg.Grace, 5*time.Minute)
	cfg.MaxSessions = cmp.Or(cfg.MaxSessions, 1024)
	cfg.MaxLinks = min(cmp.Or(cfg.MaxLinks, 16), 256)
	cfg.MaxHandshakes = cmp.Or(cfg.MaxHandshakes, 2048)
	cfg.Tuning = cfg.Tuning.withDefaults()
	cfg.Budget = cmp.Or(cfg.Budget, NewBudget(32768, 256<<20))
	if cfg.OnSession == nil {
		cfg.OnSession = func(context.Context, *Session) {}
	}
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	return &Server{
		cfg: cfg, log: cfg.Logger, handshakes: authlistener.Bound{Max: cfg.MaxHandshakes},
		sessions: make(map[SessionID]*Session), users: make(map[string]*user),
	}
}

// Sessions returns the current sessions.
func (s *Server) Sessions() []*Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.sessions))
}

// Serve accepts conns until ctx ends or a listener fails. It then closes the listeners and all sessions and waits for
// them. It returns nil if ctx ended. Without listeners it serves the conns of Take. Call it once.
//
// A conn with a method OnlySession() SessionID belongs to that session: it attaches the session's links and never
// creates a session. If its hello names another session the server closes it without an answer.
func (s *Server) Serve(ctx context.Context, listeners ...net.Listener) error {
	g, ctx := errgroup.WithContext(ctx) // its end ends the other listeners, and handshakes
	for _, l := range listeners {
		defer context.AfterFunc(ctx, func() { l.Close() })()
		g.Go(func() error {
			return authlistener.Serve(ctx, l, s.log, func(conn net.Conn) { s.Take(ctx, conn) })
		})
	}
	if len(listeners) == 0 {
		<-ctx.Done()
	}
	err := g.Wait()
	for _, l := range listeners {
		l.Close()
	}

	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	var closing sync.WaitGroup
	for _, session := range s.Sessions() {
		closing.Go(func() { session.Close() })
	}
	closing.Wait()
	s.wg.Wait()
	return err
}

// Take serves a conn that the caller has accepted, as Serve does with those of its listeners, and owns it. The end of
// ctx ends the handshake. Take returns false, and closes conn, if Serve is ending.
func (s *Server) Take(ctx context.Context, conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		conn.Close()
		return false
	}
	held := s.handshakes.Enter(conn)
	s.wg.Go(func() {
		if err := s.greet(ctx, conn, held); err != nil {
			s.log.Info("conn rejected", "remote", conn.RemoteAddr(), "reason", err)
			if s.cfg.OnRefused != nil {
				s.cfg.OnRefused(conn, err)
			}
			conn.Close()
		}
	})
	return true
}

// greet performs a conn's handshake and attaches the conn to its link. After an error the caller closes conn.
func (s *Server) greet(ctx context.Context, conn net.Conn, held *authlistener.Held) error {
	hctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	stop := context.AfterFunc(hctx, func() { conn.Close() })
	defer stop()
	h, err := readHandshake[hello](conn)
	if held.Leave() {
		return errEvicted
	}
	if errors.Is(err, ErrVersion) {
		conn.Write(marshalHandshake(reply{Status: statusVersion}))
	}
	if err != nil {
		return err
	}
	only, bound := conn.(interface{ OnlySession() SessionID })
	if bound && only.OnlySession() != h.Session {
		return fmt.Errorf("session %s link %d: %w", h.Session.String()[:8], h.Link, ErrOtherSession)
	}
	session, st := s.find(h, !bound)
	if st == statusOK {
		st = s.resume(session, h, conn, stop)
	}
	if st != statusOK {
		conn.Write(marshalHandshake(reply{Status: st}))
		return fmt.Errorf("session %s link %d: %w", h.Session.String()[:8], h.Link, st.err())
	}
	return nil
}

// find returns the session that a hello names, or creates it if mayMake is set.
func (s *Server) find(h hello, mayMake bool) (*Session, status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	session := s.sessions[h.Session]
	switch {
	case session != nil && subtle.ConstantTimeCompare(session.token[:], h.Token[:]) != 1:
		return nil, statusRefused
	case session != nil && int(h.Link) >= s.cfg.MaxLinks:
		return nil, statusFull
	case session != nil:
		return session, statusOK
	case !mayMake || h.Flags&flagFirst == 0 || h.Link != 0 || h.Received != 0 || s.closing:
		return nil, statusUnknown
	}
	session = newSession(identity{h.Session, h.Token, false}, s.cfg.MaxLinks, s.cfg.Budget, s.cfg.Tuning, s.log)
	if err := s.enter(session); err != nil {
		return nil, statusFull
	}
	s.sessions[h.Session] = session
	s.wg.Go(func() { s.serve(session) })
	return session, statusOK
}

// expire ends a session whose grace period is over, unless a conn attaches at the same moment.
func (s *Session) expire() {
	s.end(fmt.Errorf("no conn for %s: %w", s.grace, ErrSessionLost), true)
}

// serve runs a session's handler, and removes the session when it has ended. The handler gets every session that was
// established, also one that has ended by the time this goroutine runs.
func (s *Server) serve(session *Session) {
	ctx, cancel := context.WithCancel(context.Background())
	var handler sync.WaitGroup
	select {
	case <-session.ready:
	case <-session.done:
	}
	if wakeup.IsClosed(session.ready) {
		session.log.Info("session established")
		handler.Go(func() { s.cfg.OnSession(ctx, session) })
	}
	<-session.done
	cancel()
	s.remove(session)
	session.log.Info("session ended", "reason", session.Err())
	handler.Wait()
	session.wg.Wait()
	session.settle()
	s.leave(session)
}

// resume answers the hello and attaches conn to its link. With statusOK the link owns conn.
func (s *Server) resume(session *Session, h hello, conn net.Conn, stop func() bool) status {
	l := session.link(int(h.Link))
	if l == nil {
		return statusUnknown
	}
	l.handshake.Lock()
	defer l.handshake.Unlock()
	l.mu.Lock()
	stale := h.Attempt <= l.attempt
	unknown := !l.load.born.Load() && (h.Flags&flagFirst == 0 || h.Received != 0)
	if !stale && !unknown {
		l.attempt = h.Attempt
	}
	l.mu.Unlock()
	switch {
	case stale:
		return statusStale
	case unknown:
		return statusUnknown
	}
	l.load.bulk.Store(h.Flags&flagBulk != 0)
	received := l.quiesce()
	answer := reply{Status: statusOK, Flags: h.Flags & flagBulk, Received: received}
	if _, err := conn.Write(marshalHandshake(answer)); err != nil {
		l.log.Info("conn lost in handshake", "error", err)
		conn.Close()
		return statusOK
	}
	if !stop() { // the handshake's time is up, and conn is closed
		return statusOK
	}
	if _, err := l.attach(conn, fallback, h.Received); err != nil {
		l.log.Warn("conn does not fit", "error", err)
		conn.Close()
		session.fail(err)
	}
	return statusOK
}
