package daemon

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kubevpn/internal/api"
)

// Connection is one live connection to a cluster. Run is called once; the other methods may be called at any
// time, concurrently, also after Run has returned.
type Connection interface {
	// ID is the same for every connection to the same cluster.
	ID() string
	// Run makes the connection and keeps it until ctx ends or it cannot be kept; it cleans up before it returns.
	Run(ctx context.Context) error
	// Connected is closed once the connection was proved to work. It stays closed.
	Connected() <-chan struct{}
	// Status is a snapshot; it does not block.
	Status() api.Connection
	// SetNamespace changes the namespace in which short names are looked up first.
	SetNamespace(namespace string) error
	// Upgrade replaces the traffic manager with one of the image, unless it runs that, and moves the connection,
	// which must be connected, to it.
	Upgrade(ctx context.Context, image string, progress func(api.Event)) error
}

// ConnectionConfig is what a Connection is made from.
type ConnectionConfig struct {
	Request  api.ConnectRequest
	Network  Network
	ClientID string
	Progress func(api.Event) // may be called concurrently
	Logger   *slog.Logger
}

// How long parts of an ending may take before they are given up on. The helper removes everything in any case.
const (
	endTimeout   = 15 * time.Second // a connection's Run, after its context has ended
	helperLinger = 10 * time.Second // a helper without a connection: the CLI that brought it is about to ask
)

var (
	errDisconnected = errors.New("disconnected") // the cause of a context that ended because a user asked
	errNeedsHelper  = errors.New("a root helper is needed")
	errEnding       = api.Errorf(api.ExitDaemon, "the daemon is ending").WithHint("try again")
)

// set is the connections of this daemon and the machine that they share.
type set struct {
	newConnection func(ConnectionConfig) (Connection, error)
	clientID      string
	linger        time.Duration
	placed        bool // the machine is a Place: nobody on this machine asks its resolver
	logger        *slog.Logger
	changed       func()      // called, without mu, when idle's answer may be another
	intercepts    *intercepts // on the connections; its mutex is never taken while mu is held

	mu      sync.Mutex
	byID    map[string]*live
	machine *machine      // nil: there is no helper
	closing chan struct{} // not nil while a machine is being closed; closed when it is
	held    bool          // the machine stays although nothing uses it yet
	shut    bool          // no more connections
	tasks   sync.WaitGroup
}

func newSet(newConnection func(ConnectionConfig) (Connection, error), intercepts *intercepts, clientID string, logger *slog.Logger) *set {
	return &set{
		newConnection: newConnection, clientID: clientID, linger: helperLinger, logger: logger,
		changed: func() {}, intercepts: intercepts, byID: map[string]*live{},
	}
}

// connect makes the connection that req asks for, or joins the one that there is. It calls begin once with
// the connection's ID, then emit with what happens, and returns the connected connection. When ctx ends
// before that, and nobody else wants it, the connection is cleaned up before connect returns.
func (s *set) connect(ctx context.Context, req api.ConnectRequest, begin func(id string), emit func(api.Event)) (api.Connection, error) {
	l, err := s.hold(ctx, req, begin, emit)
	if err != nil {
		return api.Connection{}, err
	}
	defer s.release(l, emit)
	s.retain(l)
	return l.status(), nil
}

// hold is connect for who needs the connection for a while: it does not end before release, unless by itself or because
// somebody asked. Whether it stays after that is what retain says.
func (s *set) hold(ctx context.Context, req api.ConnectRequest, begin func(id string), emit func(api.Event)) (*live, error) {
	l, joined, err := s.obtain(ctx, req)
	if err != nil {
		return nil, err
	}
	begin(l.id)
	if !joined || !l.wasReady() { // what was said before that is of no interest any more
		err = l.follow(ctx, emit)
	}
	if err == nil && joined {
		err = s.adapt(ctx, l, req, emit)
	}
	if err != nil {
		s.release(l, emit)
		return nil, err
	}
	return l, nil
}

// retain has the connection stay when nobody waits for it.
func (s *set) retain(l *live) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.kept = true
}

// obtain returns the live connection for req with a waiter added, starting it if need be.
func (s *set) obtain(ctx context.Context, req api.ConnectRequest) (l *live, joined bool, err error) {
	for {
		l, joined, busy, err := s.tryObtain(req)
		if busy == nil {
			return l, joined, err
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		}
	}
}

// tryObtain is obtain, except that where something has to end first it returns the channel that says when.
func (s *set) tryObtain(req api.ConnectRequest) (l *live, joined bool, busy <-chan struct{}, err error) {
	feed, share := newFeed(), newShare(s.logger)
	conn, err := s.newConnection(ConnectionConfig{
		Request: req, Network: share, ClientID: s.clientID, Logger: s.logger, Progress: feed.add,
	})
	if err != nil {
		return nil, false, nil, err
	}
	id := conn.ID()

	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.byID[id]
	switch {
	case s.shut:
		return nil, false, nil, errEnding
	case old != nil && old.failed == nil && old.ending:
		return nil, false, old.done, nil
	case old != nil && old.failed == nil:
		old.waiters++
		s.logger.Info("request joins the connection that is there", "connection", id)
		return old, true, nil, nil
	case s.closing != nil:
		return nil, false, s.closing, nil
	case s.machine == nil:
		return nil, false, nil, errNeedsHelper
	}
	share.machine, s.held = s.machine, false
	ctx, cancel := context.WithCancelCause(context.Background()) // it outlives the request
	l = &live{task: newTask("connection", conn.Connected(), feed, cancel), id: id, conn: conn, request: req, share: share}
	s.byID[id] = l
	s.tasks.Go(func() { s.run(ctx, l) })
	return l, false, nil, nil
}

// release takes a waiter away. A connection that nobody waits for any more, and that nobody has retained, ends;
// release then waits for that.
func (s *set) release(l *live, emit func(api.Event)) {
	s.mu.Lock()
	abandoned := l.unwait()
	s.mu.Unlock()
	if !abandoned {
		return
	}
	step := disconnecting(l.conn.Status(), l.id)
	emit(api.Event{Time: time.Now(), Step: step, Detail: l.id})
	if s.await(l) {
		emit(api.Event{Time: time.Now(), Step: step, Detail: l.id, Done: true})
	}
}

// disconnecting is the step of a connection's end.
func disconnecting(c api.Connection, id string) string {
	return "Disconnecting from " + cmp.Or(c.Cluster, id)
}

// adapt gives a connection that was there before what it can take of a later request, and says what it cannot.
func (s *set) adapt(ctx context.Context, l *live, req api.ConnectRequest, emit func(api.Event)) error {
	now := l.conn.Status()
	if !req.Use && req.Namespace != "" && req.Namespace != now.Namespace {
		if err := l.conn.SetNamespace(req.Namespace); err != nil {
			return err
		}
		emit(api.Event{Time: time.Now(), Step: "Changing the namespace", Detail: now.Namespace + " → " + req.Namespace, Done: true})
	}
	was := l.request
	if req.Upgrade {
		if err := l.conn.Upgrade(ctx, req.Image, emit); err != nil {
			return err
		}
		was.Image = req.Image
	}
	if lost := differences(was, req); lost != "" && !req.Use {
		emit(api.Event{Time: time.Now(), Warning: "this cluster is connected already, with another " + lost +
			": `kubevpn disconnect " + l.id + "` first to change that"})
	}
	return nil
}

// differences names the settings of a connection that another request would have otherwise.
func differences(a, b api.ConnectRequest) string {
	names := ""
	for _, d := range []struct {
		name string
		same bool
	}{
		{"context", a.Context == b.Context},
		{"manager namespace", a.ManagerNamespace == b.ManagerNamespace},
		{"image", a.Image == b.Image},
		{"netstack", a.Netstack == b.Netstack},
		{"transport", a.Transport == b.Transport},
		{"scheduler", a.Scheduler == b.Scheduler},
		{"set of extra networks", slices.Equal(a.ExtraCIDRs, b.ExtraCIDRs)},
		{"set of excluded networks", slices.Equal(a.ExcludeCIDRs, b.ExcludeCIDRs)},
	} {
		if d.same {
			continue
		}
		if names != "" {
			names += ", "
		}
		names += d.name
	}
	return names
}

// active counts the connections that have not failed; s.mu is held.
func (s *set) active() int {
	n := 0
	for _, l := range s.byID {
		if l.failed == nil {
			n++
		}
	}
	return n
}

// counts says how many connections are live, and whether there is a helper.
func (s *set) counts() (connections int, helper bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active(), s.machine != nil
}

// inUse says whether there is anything to stay for.
func (s *set) inUse() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID) > 0 || s.machine != nil || s.closing != nil
}

// status lists the connections, the oldest first.
func (s *set) status() []api.Connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]api.Connection, 0, len(s.byID))
	for _, l := range s.byID {
		var c api.Connection
		switch {
		case l.failed != nil:
			c = l.last
			c.Status, c.Error = api.StatusFailed, l.failed
		case l.ending:
			c = l.conn.Status()
			c.Status = api.StatusDisconnecting
		default:
			c = l.conn.Status()
			if mode, ok := l.share.machine.mode.Load().(api.ResolverMode); ok && c.DNS.Mode != api.ResolverNone {
				c.DNS.Mode = mode // it may change by itself: systemd-resolved comes and goes
			}
		}
		c.ID = l.id
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b api.Connection) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return out
}
