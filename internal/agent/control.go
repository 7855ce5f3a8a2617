package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
	"kubevpn/pkg/transport"
)

const (
	// maxOrder bounds a line of a laptop's: a certificate and its key are the largest part of one.
	maxOrder = 1 << 20
	// helloPatience is how long a laptop may take for its first word.
	helloPatience = 10 * time.Second
	// reportPause is the least time between two reports of the state.
	reportPause = 200 * time.Millisecond
)

// link is one session of an owner.
type link struct {
	primary *primary
	owner   *owner
	session *transport.Session
	taker   taker
	log     *slog.Logger

	over *api.Error // why the laptop has to go; guarded by the primary's lock
}

// serve answers what the laptop opens until the session has ended. Only orders come from there.
func (l *link) serve(ctx context.Context) {
	var talks sync.WaitGroup
	defer talks.Wait()
	for {
		in, err := l.session.Accept(ctx)
		if err != nil {
			return // the transport has logged why
		}
		if in.Proto != transport.ProtoControl || in.Datagrams() {
			if err := in.Reject(transport.CodeProhibited); err != nil {
				l.log.Debug("refusing", "request", in.Request, "err", err)
			}
			continue
		}
		talks.Go(func() {
			if err := l.talk(ctx, in); err != nil {
				l.log.Debug("control stream", "err", err)
			}
		})
	}
}

// talk holds a control stream:
//
//	laptop                    primary
//	  │ AgentHello ─────────────▶│
//	  │◀──── AgentReport, State  │   or Error, and the stream ends
//	  │ AgentOrder ─────────────▶│
//	  │◀──── AgentReport, its ID │   when the order is carried out, or refused
//	  │◀──── AgentReport, State  │   when something has changed
//	  │◀──── AgentReport, Error  │   somebody has reset the pod; the stream ends
func (l *link) talk(ctx context.Context, in *transport.Incoming) error {
	control, err := in.Accept()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var reports sync.WaitGroup
	defer reports.Wait()
	defer cancel()
	defer control.Close()
	stop := context.AfterFunc(ctx, func() { control.Close() })
	defer stop()

	out := &reporter{to: json.NewEncoder(control)}
	lines := bufio.NewScanner(control)
	lines.Buffer(nil, maxOrder)
	if err := control.SetReadDeadline(time.Now().Add(helloPatience)); err != nil {
		return fmt.Errorf("waiting for the laptop: %w", err)
	}
	if refusal := readHello(lines); refusal != nil {
		l.log.Warn("laptop refused", "err", refusal)
		return errors.Join(out.send(api.AgentReport{Error: refusal}), control.CloseWrite())
	}
	if err := control.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("waiting for orders: %w", err)
	}
	reports.Go(func() {
		defer cancel()
		if err := l.report(ctx, out); err != nil {
			l.log.Debug("reporting", "err", err)
		}
	})
	for lines.Scan() {
		var order api.AgentOrder
		if err := json.Unmarshal(lines.Bytes(), &order); err != nil {
			return errors.Join(fmt.Errorf("reading an order: %w", err),
				out.send(api.AgentReport{Error: api.Errorf(api.ExitIncompatible, "an order that is none: %w", err)}))
		}
		err := l.obey(&order)
		if err := out.send(api.AgentReport{ID: order.ID, Error: api.AsError(err)}); err != nil {
			return fmt.Errorf("answering an order: %w", err)
		}
		if order.Reset && err == nil {
			l.primary.clear(l.owner)
		}
	}
	if err := lines.Err(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("reading orders: %w", err)
	}
	return nil
}

// readHello reads the laptop's first line, and says what is wrong with it.
func readHello(lines *bufio.Scanner) *api.Error {
	if !lines.Scan() {
		err := lines.Err()
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return api.Errorf(api.ExitIncompatible, "the laptop's greeting: %w", err)
	}
	var hello api.AgentHello
	if err := json.Unmarshal(lines.Bytes(), &hello); err != nil {
		return api.Errorf(api.ExitIncompatible, "the laptop's greeting: %w", err)
	}
	if hello.Protocol != api.Protocol {
		return api.Errorf(api.ExitIncompatible, "the pod's traffic agent is kubevpn %s and speaks protocol %d; this kubevpn is %s and speaks protocol %d",
			version.String(), api.Protocol, hello.Version, hello.Protocol).
			WithHint("it ends a minute after the last intercept of the pod; `kubevpn reset` ends it at once, and the intercepts of others with it")
	}
	return nil
}

// obey carries an order out. A reset is obeyed once it is answered: it ends the stream.
func (l *link) obey(o *api.AgentOrder) error {
	kinds := 0
	for _, set := range []bool{o.Claim != nil, o.Release != "", o.Canary != nil, o.Reset} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		return api.Errorf(api.ExitIncompatible, "an order is for one thing, and this one for %d that kubevpn %s knows", kinds, version.String())
	}
	p := l.primary
	switch {
	case o.Claim != nil:
		return p.claim(o.Claim, l)
	case o.Canary != nil:
		return p.expect(o.Canary)
	case o.Release != "":
		p.mu.Lock()
		defer p.mu.Unlock()
		p.release(func(c *claim) bool { return c.owner == l.owner && c.id == o.Release })
	}
	return nil
}

// report tells the laptop the state, whenever it is another, until ctx ends or it has to go.
func (l *link) report(ctx context.Context, out *reporter) error {
	pause := time.NewTimer(reportPause)
	defer pause.Stop()
	for {
		over, changed, err := out.state(l)
		if over || err != nil {
			return err
		}
		pause.Reset(reportPause)
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		select { // what changes meanwhile goes with it
		case <-pause.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// reporter writes reports, one at a time.
type reporter struct {
	mu   sync.Mutex
	to   *json.Encoder
	told *api.AgentState
}

func (r *reporter) send(report api.AgentReport) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.to.Encode(report)
}

// state sends the state if it is another than what was told, or that it is over. It is looked up while nothing else is sent,
// so that what follows the answer to an order has that order in it.
func (r *reporter) state(l *link) (over bool, changed <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	state, why, changed := l.primary.state(l)
	if why != nil {
		return true, changed, r.to.Encode(api.AgentReport{Error: why})
	}
	if reflect.DeepEqual(state, r.told) {
		return false, changed, nil
	}
	r.told = state
	return false, changed, r.to.Encode(api.AgentReport{State: state})
}
