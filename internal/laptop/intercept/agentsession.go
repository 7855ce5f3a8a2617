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
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

const (
	heartbeat = time.Second     // the agent uses the same
	deadAfter = 3 * time.Second // without an answer, the session closes its conn; the agent uses the same

	// managerTimeout is how long a dial through the manager may take before a port-forward is tried: a NetworkPolicy
	// may drop the traffic manager's packets.
	managerTimeout   = 2 * time.Second
	agentDialTimeout = 10 * time.Second // for both dials, one after the other, with TLS

	maxReport = 1 << 20 // bytes of one report, which lists every claim of the pod

	conversationPause = time.Second // the shortest time between the starts of two conversations
	claimPause        = time.Second // after a rejected claim
)

// dialFunc opens a connection to one port.
type dialFunc func(context.Context) (net.Conn, error)

// dialAgent dials the agent with throughManager, and with forward if that fails.
func dialAgent(ctx context.Context, config *tls.Config, throughManager, forward dialFunc) (net.Conn, error) {
	attempt, cancel := context.WithTimeout(ctx, managerTimeout)
	defer cancel()
	conn, first := dialTLS(attempt, config, throughManager)
	if first == nil {
		return conn, nil
	}
	conn, err := dialTLS(ctx, config, forward)
	if err != nil {
		return nil, fmt.Errorf("through the session: %w; by port-forward: %w", first, err)
	}
	return conn, nil
}

func dialTLS(ctx context.Context, config *tls.Config, dial dialFunc) (net.Conn, error) {
	conn, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	batch := nonblock.NewBatch(conn)
	inside := tls.Client(batch, config)
	if err := inside.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("TLS with the agent: %w", err)
	}
	return &nonblock.TLS{Conn: inside, Batch: batch}, nil
}

// agentSession connects the laptop to the leader of one pod's agents: a transport session of one conn, which the client
// dials again when it breaks. For every new session it sends hello, claims, and serves.
//
//	         ┌───────────── rejected: pause─────────────┐
//	         ▼                                          │
//	dial ─▶ hello ─▶ claim ─▶ claimed ◀──▶ detached ────┼─▶ (a new session) hello ...
//	                  ▲          │
//	                  └──────────┘ the agent no longer lists the claim: it released it while the laptop did not answer
type agentSession struct {
	dial   dialFunc                      // dials conns
	claim  api.ClaimOrder                // without the target; without an ID: there is none
	target *wakeup.Value[*api.ClonePods] // as in Intercept
	record *records
	about  api.Exchange // the fields of the exchanges that the laptop knows
	serve  func(context.Context, *transport.Session)
	hello  api.AgentHello            // what it asks for
	budget *transport.Budget         // for the streams that serve accepts
	change func(func(*sessionState)) // changes the sessionState; calls of change and answered do not overlap
	// answered changes the sessionState when the agent has accepted the claim with this target or, with an error,
	// rejected it.
	answered func(pods *api.ClonePods, rejection *api.Error)
	log      *slog.Logger

	mu           sync.Mutex
	conversation *conversation // nil: none
	flushed      bool          // the first claim has ended old connections
	leaving      bool          // no more claims
}

// sessionState is the state of an agentSession.
type sessionState struct {
	attached  bool
	claimed   bool            // or greeted, if there is no claim
	away      bool            // the application receives the claim's requests, because no pod of the clone is ready
	err       error           // why it is not attached, or not claimed
	recording int             // turn of the recordOptions for which the agent records; 0: it does not record
	reset     *api.Error      // somebody has removed all intercepts of the pod
	state     *api.AgentState // the latest report
}

var errNotConnected = errors.New("not connected to the agent")

// tuning returns the heartbeat settings. The agent uses the same.
func tuning() transport.Tuning { return transport.Tuning{Heartbeat: heartbeat, DeadAfter: deadAfter} }

// run keeps the session until ctx ends. It then closes it, and the agent releases any claim that it still has.
func (l *agentSession) run(ctx context.Context) error {
	client := transport.NewClient(transport.ClientConfig{
		Dial: l.dial, DialTimeout: agentDialTimeout, Links: 1, BackoffMax: time.Second,
		OnSession: l.onSession,
		OnState: func(s transport.State, cause error) {
			l.change(func(st *sessionState) {
				st.attached = s == transport.StateConnected
				if s == transport.StateConnecting {
					st.claimed = false
				}
				if cause != nil {
					st.err = cause
				}
			})
		},
		Budget: l.budget,
		Tuning: tuning(),
		Logger: l.log,
	})
	return client.Run(ctx)
}

func (l *agentSession) onSession(ctx context.Context, s *transport.Session) {
	began := time.Now()
	err := l.runConversation(ctx, s)
	if ctx.Err() != nil {
		return
	}
	l.log.Info("the conversation with the agent ended; opening another session", "err", err)
	l.change(func(st *sessionState) {
		st.claimed, st.err = false, err
		if reported, ok := errors.AsType[*api.Error](err); ok && reported.Code == api.ExitIntercept {
			st.reset = reported
		}
	})
	wakeup.Pause(ctx, conversationPause-time.Since(began))
	if err := s.Close(); err != nil {
		l.log.Debug("closing the session", "err", err)
	}
}

// runConversation keeps a conversation, claims, and serves until the conversation ends. It returns its error.
func (l *agentSession) runConversation(ctx context.Context, s *transport.Session) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	c, err := startConversation(ctx, s, l.hello)
	if err != nil {
		return err
	}
	defer c.control.Close()
	stop := context.AfterFunc(ctx, func() { c.control.Close() })
	defer stop()
	l.set(c)
	defer l.set(nil)
	lost := wakeup.NewSignal()
	wg.Go(func() { l.serve(ctx, s) })
	if l.claim.ID == "" {
		return c.follow(func(state *api.AgentState) {
			l.change(func(st *sessionState) { st.state, st.claimed = state, true })
		})
	}
	wg.Go(func() {
		l.keepClaimed(ctx, c, lost, sync.OnceFunc(func() { wg.Go(func() { l.keepRecording(ctx, s) }) }))
	})
	return c.follow(func(state *api.AgentState) {
		l.change(func(st *sessionState) { st.state = state })
		if ownClaim(state, l.claim.ID) == nil {
			lost.Raise()
		}
	})
}

func (l *agentSession) set(c *conversation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conversation = c
}

// ownClaim returns the agent's report of this laptop's claim with that ID, or nil. state may be nil.
func ownClaim(state *api.AgentState, id string) *api.Claim {
	if state == nil {
		return nil
	}
	return api.Find(state.Claims, func(c api.Claim) bool { return c.Mine && c.ID == id })
}

// keepClaimed claims until the agent accepts, and again when the agent no longer lists the claim or the target changes.
// It calls claimed after each claim that the agent has accepted.
func (l *agentSession) keepClaimed(ctx context.Context, c *conversation, lost <-chan struct{}, claimed func()) {
	for ctx.Err() == nil {
		pods, changed := l.target.Get()
		select { // reports from before the claim do not count
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
		_, err := c.ask(ctx, api.AgentOrder{Claim: &claim}, func(rejection *api.Error) { l.answered(pods, rejection) })
		if ctx.Err() != nil || errors.Is(err, errNotConnected) {
			return
		}
		if err != nil {
			wakeup.Pause(ctx, claimPause)
			continue
		}
		claimed()
		l.mu.Lock()
		l.flushed, leaving = true, l.leaving
		l.mu.Unlock()
		if leaving { // release sent its order before this claim
			if _, err := c.order(ctx, api.AgentOrder{Release: l.claim.ID}); err != nil {
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

// order sends an order in the current conversation, and returns the agent's answer.
func (l *agentSession) order(ctx context.Context, o api.AgentOrder) (api.AgentReport, error) {
	l.mu.Lock()
	c := l.conversation
	l.mu.Unlock()
	if c == nil {
		return api.AgentReport{}, errNotConnected
	}
	return c.order(ctx, o)
}

// release releases the claim, and ends keepClaimed.
func (l *agentSession) release(ctx context.Context) error {
	l.mu.Lock()
	l.leaving = true
	l.mu.Unlock()
	_, err := l.order(ctx, api.AgentOrder{Release: l.claim.ID})
	return err
}

// conversation is the laptop's end of a control stream: it sends orders and receives reports.
type conversation struct {
	control *transport.Stream

	mu      sync.Mutex
	out     *json.Encoder
	last    uint64
	waiting map[uint64]waiter // by order ID; nil: the conversation has ended
}

// waiter waits for an answer.
type waiter struct {
	answer           chan api.AgentReport // closed without a value if the conversation ends first
	beforeNextReport func(*api.Error)
}

// startConversation opens the control stream and sends hello. The caller closes the control stream.
func startConversation(ctx context.Context, s *transport.Session, hello api.AgentHello) (*conversation, error) {
	control, err := s.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		return nil, fmt.Errorf("opening the control stream: %w", err)
	}
	c := &conversation{control: control, out: json.NewEncoder(control),
		waiting: make(map[uint64]waiter)}
	hello.Protocol, hello.Oldest, hello.Version = api.Protocol, api.OldestProtocol, version.String()
	if err := c.out.Encode(hello); err != nil {
		control.Close()
		return nil, fmt.Errorf("sending hello to the agent: %w", err)
	}
	return c, nil
}

// order sends an order to the agent and returns its answer. Errors of the agent are *api.Error.
func (c *conversation) order(ctx context.Context, o api.AgentOrder) (api.AgentReport, error) {
	return c.ask(ctx, o, func(*api.Error) {})
}

// ask is order, but calls beforeNextReport with the answer's error before follow reads the next report.
func (c *conversation) ask(ctx context.Context, o api.AgentOrder,
	beforeNextReport func(*api.Error)) (report api.AgentReport, err error) {
	answer := make(chan api.AgentReport, 1)
	c.mu.Lock()
	if c.waiting == nil {
		c.mu.Unlock()
		return report, errNotConnected
	}
	c.last++
	o.ID = c.last
	c.waiting[o.ID] = waiter{answer, beforeNextReport}
	err = c.out.Encode(o)
	c.mu.Unlock()
	if err != nil {
		return report, fmt.Errorf("sending an order to the agent: %w", err)
	}
	select {
	case report, ok := <-answer:
		switch {
		case !ok:
			return report, errNotConnected
		case report.Error != nil:
			return report, report.Error
		}
		return report, nil
	case <-ctx.Done():
		return report, context.Cause(ctx)
	}
}

// follow reads reports until the stream ends, which is an error. Pending calls of ask then return errNotConnected.
func (c *conversation) follow(state func(*api.AgentState)) error {
	defer c.end()
	in := api.NewLines(c.control, maxReport)
	for {
		var r api.AgentReport
		if err := in.Next(&r); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("reading from the agent: %w", err)
		}
		if r.State != nil {
			state(r.State)
		}
		switch {
		case r.ID != 0:
			c.answer(r)
		case r.Error != nil:
			return r.Error // the agent ends the conversation
		}
	}
}

func (c *conversation) answer(r api.AgentReport) {
	c.mu.Lock()
	w, ok := c.waiting[r.ID]
	delete(c.waiting, r.ID)
	c.mu.Unlock()
	if ok {
		w.beforeNextReport(r.Error)
		w.answer <- r
	}
}

// end makes pending calls of ask return errNotConnected.
func (c *conversation) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiting {
		close(w.answer)
	}
	c.waiting = nil
}
