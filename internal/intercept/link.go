package intercept

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
	"kubevpn/pkg/rawio"
	"kubevpn/pkg/transport"
)

const (
	heartbeat = time.Second     // the agent has the same: how soon an end that is gone is noticed
	deadAfter = 3 * time.Second // likewise

	// directTimeout is how long the way through the session may take, before a port-forward is tried: a NetworkPolicy that
	// keeps the traffic manager away drops packets.
	directTimeout  = 2 * time.Second
	carrierTimeout = 10 * time.Second // both ways, one after the other, TLS included

	conversePause = time.Second // after a conversation that ended at once
	claimPause    = time.Second // after a claim that was refused
)

// dialFunc opens a connection to one port.
type dialFunc func(context.Context) (net.Conn, error)

// carrier dials the agent by the first of these ways on which it answers with its key.
func carrier(ctx context.Context, config *tls.Config, direct, forward dialFunc) (net.Conn, error) {
	attempt, cancel := context.WithTimeout(ctx, directTimeout)
	defer cancel()
	conn, first := secure(attempt, config, direct)
	if first == nil {
		return conn, nil
	}
	conn, err := secure(ctx, config, forward)
	if err != nil {
		return nil, fmt.Errorf("through the session: %w; by port-forward: %w", first, err)
	}
	return conn, nil
}

func secure(ctx context.Context, config *tls.Config, dial dialFunc) (net.Conn, error) {
	conn, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	batch := rawio.NewBatch(conn)
	inside := tls.Client(batch, config)
	if err := inside.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("TLS with the agent: %w", err)
	}
	return &sealed{Conn: inside, batch: batch}, nil
}

// sealed is a carrier: TLS over a connection that is not a socket.
type sealed struct {
	*tls.Conn
	batch *rawio.Batch
}

// Write sends p, however long, in one write to the connection beneath.
func (c *sealed) Write(p []byte) (int, error) { return c.batch.Through(c.Conn, p) }

// Close closes the connection without TLS's farewell, which takes five seconds where nobody takes it, and tells the agent
// nothing that the session does not.
func (c *sealed) Close() error { return c.batch.Close() }

// link is the way to the primary agent of one pod: a transport session of one carrier, that is dialled again when it
// breaks. For every new session it says hello, claims, and serves.
//
//	         ┌───────────── refused: pause ─────────────┐
//	         ▼                                          │
//	dial ─▶ hello ─▶ claim ─▶ claimed ◀──▶ detached ────┼─▶ (a new session) hello ...
//	                  ▲          │
//	                  └──────────┘ the agent does not list the claim: it let it go while nobody answered
type link struct {
	dial   dialFunc       // gives carriers
	claim  api.ClaimOrder // but for who gets the requests
	target *cloneTarget
	serve  func(context.Context, *transport.Session)
	change func(func(*linkState)) // what is known has changed; calls do not overlap
	log    *slog.Logger

	mu      sync.Mutex
	talking *conversation // nil: there is none
	flushed bool          // the first claim has ended old connections; another one need not
	leaving bool          // nothing is claimed any more
}

// linkState is what is known of a link.
type linkState struct {
	attached bool
	claimed  bool
	err      error           // why it is not attached, or not claimed
	refused  bool            // the claim was, just now: err says why
	reset    *api.Error      // somebody has removed all intercepts of the pod
	state    *api.AgentState // the latest
}

var errNoLink = errors.New("there is no link to the agent")

// tuning is both ends'.
func tuning() transport.Tuning { return transport.Tuning{Heartbeat: heartbeat, DeadAfter: deadAfter} }

// run keeps the link until ctx ends. It then ends the session, and with it whatever of the claim the agent still has.
func (l *link) run(ctx context.Context) error {
	client := transport.NewClient(transport.ClientConfig{
		Dial: l.dial, DialTimeout: carrierTimeout, Links: 1, BackoffMax: time.Second,
		OnSession: l.onSession,
		OnState: func(s transport.State, cause error) {
			l.change(func(st *linkState) {
				st.attached = s == transport.StateConnected
				if s == transport.StateConnecting {
					st.claimed = false
				}
				if cause != nil {
					st.err = cause
				}
			})
		},
		Tuning: tuning(),
		Logger: l.log,
	})
	return client.Run(ctx)
}

func (l *link) onSession(ctx context.Context, s *transport.Session) {
	began := time.Now()
	err := l.converse(ctx, s)
	if ctx.Err() != nil {
		return
	}
	l.log.Info("the conversation with the agent ended; opening another session", "err", err)
	l.change(func(st *linkState) {
		st.claimed, st.err = false, err
		if said := (*api.Error)(nil); errors.As(err, &said) && said.Code == api.ExitIntercept {
			st.reset = said
		}
	})
	pause(ctx, conversePause-time.Since(began))
	if err := s.Close(); err != nil {
		l.log.Debug("closing the session", "err", err)
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// converse is the control stream's life, and what goes on beside it.
func (l *link) converse(ctx context.Context, s *transport.Session) error {
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	c, err := talk(ctx, s)
	if err != nil {
		return err
	}
	defer c.control.Close()
	stop := context.AfterFunc(ctx, func() { c.control.Close() })
	defer stop()
	l.set(c)
	defer l.set(nil)
	lost := make(chan struct{}, 1)
	beside.Go(func() { l.serve(ctx, s) })
	beside.Go(func() { l.keepClaimed(ctx, c, lost) })
	err = c.follow(func(state *api.AgentState) {
		l.change(func(st *linkState) { st.state = state })
		if !lists(state, l.claim.ID) {
			select {
			case lost <- struct{}{}:
			default:
			}
		}
	})
	return err
}

func (l *link) set(c *conversation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.talking = c
}

// lists reports whether the agent has the claim.
func lists(state *api.AgentState, id string) bool {
	for _, c := range state.Claims {
		if c.Mine && c.ID == id {
			return true
		}
	}
	return false
}

// keepClaimed claims until that is granted, and again whenever the agent says that it has no such claim.
func (l *link) keepClaimed(ctx context.Context, c *conversation, lost <-chan struct{}) {
	for ctx.Err() == nil {
		pods, changed := l.target.now()
		select { // what was said before the claim is about the time before it
		case <-lost:
		default:
		}
		l.mu.Lock()
		claim, leaving := l.claim, l.leaving
		claim.Clone = pods
		claim.Flush = claim.Flush && !l.flushed
		l.mu.Unlock()
		if leaving {
			return
		}
		err := c.tell(ctx, api.AgentOrder{Claim: &claim}, func(refused *api.Error) {
			l.change(func(st *linkState) {
				st.claimed, st.refused, st.err = refused == nil, refused != nil, nil
				if refused != nil {
					st.err = refused
				}
			})
		})
		if ctx.Err() != nil || errors.Is(err, errNoLink) {
			return
		}
		if err != nil {
			pause(ctx, claimPause)
			continue
		}
		l.mu.Lock()
		l.flushed, leaving = true, l.leaving
		l.mu.Unlock()
		if leaving { // the release was given before the claim
			if err := c.order(ctx, api.AgentOrder{Release: l.claim.ID}); err != nil {
				l.log.Debug("releasing a claim that came too late", "err", err)
			}
			return
		}
		select {
		case <-lost:
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// order gives an order to the agent and waits for its answer. Errors of the agent are *api.Error.
func (l *link) order(ctx context.Context, o api.AgentOrder) error {
	l.mu.Lock()
	c := l.talking
	l.mu.Unlock()
	if c == nil {
		return errNoLink
	}
	return c.order(ctx, o)
}

// release takes the claim back.
func (l *link) release(ctx context.Context) error {
	l.mu.Lock()
	l.leaving = true
	l.mu.Unlock()
	return l.order(ctx, api.AgentOrder{Release: l.claim.ID})
}

// conversation is the laptop's end of a control stream: orders out, reports in.
type conversation struct {
	control *transport.Stream

	mu      sync.Mutex
	out     *json.Encoder
	last    uint64
	waiting map[uint64]waiter // nil: it is over
}

// waiter waits for an answer.
type waiter struct {
	answer chan *api.Error  // closed without one: there will be none
	first  func(*api.Error) // called before anything is read that the agent said afterwards
}

// talk begins a conversation, and says hello. The caller closes the control stream.
func talk(ctx context.Context, s *transport.Session) (*conversation, error) {
	control, err := s.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		return nil, fmt.Errorf("opening the control stream: %w", err)
	}
	c := &conversation{control: control, out: json.NewEncoder(control), waiting: make(map[uint64]waiter)}
	if err := c.out.Encode(api.AgentHello{Protocol: api.Protocol, Version: version.String()}); err != nil {
		control.Close()
		return nil, fmt.Errorf("greeting the agent: %w", err)
	}
	return c, nil
}

func (c *conversation) order(ctx context.Context, o api.AgentOrder) error {
	return c.tell(ctx, o, func(*api.Error) {})
}

// tell gives an order, and returns its answer; first has it before any later report is heard.
func (c *conversation) tell(ctx context.Context, o api.AgentOrder, first func(*api.Error)) error {
	answer := make(chan *api.Error, 1)
	c.mu.Lock()
	if c.waiting == nil {
		c.mu.Unlock()
		return errNoLink
	}
	c.last++
	o.ID = c.last
	c.waiting[o.ID] = waiter{answer, first}
	err := c.out.Encode(o)
	c.mu.Unlock()
	if err != nil {
		return fmt.Errorf("giving an order to the agent: %w", err)
	}
	select {
	case refused, ok := <-answer:
		switch {
		case !ok:
			return errNoLink
		case refused != nil:
			return refused
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// follow reads reports until the stream ends, which is an error. Who still waits for an answer then gets errNoLink.
func (c *conversation) follow(state func(*api.AgentState)) error {
	defer c.end()
	in := json.NewDecoder(c.control)
	for {
		var r api.AgentReport
		if err := in.Decode(&r); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("listening to the agent: %w", err)
		}
		if r.State != nil {
			state(r.State)
		}
		switch {
		case r.ID != 0:
			c.answer(r.ID, r.Error)
		case r.Error != nil:
			return r.Error // the agent ends the conversation
		}
	}
}

func (c *conversation) answer(id uint64, refused *api.Error) {
	c.mu.Lock()
	w, ok := c.waiting[id]
	delete(c.waiting, id)
	c.mu.Unlock()
	if ok {
		w.first(refused)
		w.answer <- refused
	}
}

// end answers who still waits with errNoLink.
func (c *conversation) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiting {
		close(w.answer)
	}
	c.waiting = nil
}
