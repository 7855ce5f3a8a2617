//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wire/transport"
)

const (
	// maxOrder is the largest line of a laptop, in bytes: most of it is a certificate and its key.
	maxOrder = 1 << 20
	// helloTimeout bounds the wait for a laptop's AgentHello.
	helloTimeout = 10 * time.Second
	// reportPause is the minimum time between two reports of the state.
	reportPause = 200 * time.Millisecond
)

// laptopSession is one session of an owner's laptop. Its goroutines belong to serve.
type laptopSession struct {
	leader *leader
	owner  *owner
	laptop laptop
	log    *slog.Logger
	hello  atomic.Pointer[api.AgentHello] // nil: none was accepted

	over *api.Error // why the session must end; guarded by leader.mu
}

// asksListens reports whether the laptop asks where the pod's sockets listen.
func (s *laptopSession) asksListens() bool {
	hello := s.hello.Load()
	return hello != nil && hello.Listens
}

// serve serves the streams that the laptop opens until the session ends: one control stream, record streams, and flows.
func (s *laptopSession) serve(ctx context.Context) {
	var talks sync.WaitGroup
	defer talks.Wait()
	flows := dial.NewFlows(s.leader.dialer, s.laptop.session, &talks)
	greeted := false // a session has one control stream
	for {
		in, err := s.laptop.session.Accept(ctx)
		if err != nil {
			return // the transport has logged why
		}
		serve := talk(s.serveControl)
		switch {
		case in.Proto == transport.ProtoRecord && !in.Datagrams():
			serve = s.serveRecords
		case in.Proto == transport.ProtoTCP, in.Proto == transport.ProtoUDP, in.Proto == transport.ProtoEcho:
			talks.Go(func() {
				if err := s.dial(ctx, flows, in); err != nil {
					s.log.Debug("cannot answer a flow of the laptop", "request", in.Request, "err", err)
				}
			})
			continue
		case in.Proto != transport.ProtoControl || in.Datagrams() || greeted:
			if err := in.Reject(transport.CodeProhibited); err != nil {
				s.log.Debug("rejected a stream", "request", in.Request, "err", err)
			}
			continue
		default:
			greeted = true
		}
		talks.Go(func() {
			if err := converse(ctx, in, serve); err != nil {
				s.log.Debug("cannot serve a stream of the laptop", "request", in.Request, "err", err)
			}
		})
	}
}

// dial connects a flow of the laptop from the pod, with the pod's address and by its routes.
//
//	laptop's program ─▶ flow ─▶ agent ─▶ connect in the pod's network namespace ─▶ kube-proxy or CNI of the node ─▶ peer
func (s *laptopSession) dial(ctx context.Context, flows *dial.Flows, in *transport.Incoming) error {
	hello := s.hello.Load()
	if hello == nil {
		return in.Reject(transport.CodeProhibited)
	}
	if !hello.MayExec {
		if err := s.leader.filter.Check(in.Dst); err != nil {
			return in.RejectError(err)
		}
	}
	switch in.Proto {
	case transport.ProtoTCP:
		return flows.AcceptTCP(ctx, in, dial.Caller{})
	case transport.ProtoUDP:
		return flows.AcceptUDP(in, dial.Caller{})
	default:
		return flows.AcceptEcho(in, dial.Caller{})
	}
}

// talk serves a stream until it ends. Its goroutines belong to others, which end with ctx; cancel ends ctx.
type talk func(ctx context.Context, cancel context.CancelFunc, stream *transport.Stream, others *sync.WaitGroup) error

// converse accepts a stream and serves it. It closes the stream when ctx ends.
func converse(ctx context.Context, in *transport.Incoming, serve talk) error {
	stream, err := in.Accept()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	defer others.Wait()
	defer cancel()
	defer stream.Close()
	defer context.AfterFunc(ctx, func() { stream.Close() })()
	return serve(ctx, cancel, stream, &others)
}

// serveControl serves a control stream until it ends:
//
//	laptop                    leader
//	  │ AgentHello ─────────────▶│
//	  │◀──── AgentReport, State  │   or Error, and the stream ends
//	  │ AgentOrder ─────────────▶│
//	  │◀──── AgentReport, its ID │   when the order is carried out, or rejected
//	  │◀──── AgentReport, State  │   when something has changed
//	  │◀──── AgentReport, Error  │   after a reset; the stream ends
func (s *laptopSession) serveControl(ctx context.Context, cancel context.CancelFunc, control *transport.Stream,
	reports *sync.WaitGroup) error {
	out := &reporter{to: json.NewEncoder(control)}
	var hello api.AgentHello
	lines, err := readFirst(control, maxOrder, &hello)
	if rejection := judge(&hello, err); rejection != nil {
		s.log.Warn("rejected a laptop", "err", rejection)
		return errors.Join(out.send(api.AgentReport{Error: rejection}), control.CloseWrite())
	}
	s.hello.Store(&hello)
	if hello.Listens {
		s.leader.look()
	}
	reports.Go(func() {
		defer cancel()
		if err := s.report(ctx, out); err != nil {
			s.log.Debug("cannot report", "err", err)
		}
	})
	for {
		var order api.AgentOrder
		switch err := lines.Next(&order); {
		case err == io.EOF || ctx.Err() != nil:
			return nil
		case err != nil:
			return errors.Join(fmt.Errorf("reading an order: %w", err),
				out.send(api.AgentReport{Error: api.Errorf(api.ExitIncompatible, "cannot read an order: %w", err)}))
		}
		answer, err := s.obey(&order)
		answer.ID, answer.Error = order.ID, api.AsError(err)
		if err := out.send(answer); err != nil {
			return fmt.Errorf("answering an order: %w", err)
		}
		if order.Reset && err == nil {
			s.leader.clear(s.owner)
		}
	}
}

// readFirst reads the first line of a stream, which must arrive within helloTimeout.
func readFirst(stream *transport.Stream, limit int, v any) (*api.Lines, error) {
	if err := stream.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return nil, err
	}
	lines := api.NewLines(stream, limit)
	return lines, errors.Join(lines.Next(v), stream.SetReadDeadline(time.Time{}))
}

// judge returns an error for the laptop if the two cannot talk. err is that of reading the hello.
func judge(hello *api.AgentHello, err error) *api.Error {
	if err != nil {
		return api.Errorf(api.ExitIncompatible, "cannot read the laptop's hello: %w", err)
	}
	if _, ok := api.CommonProtocol(hello.Protocol, hello.Oldest); !ok {
		return api.Errorf(api.ExitIncompatible,
			"the pod's traffic agent is kubevpn %s and speaks protocol %d; this kubevpn is %s and speaks protocol %d",
			version.String(), api.Protocol, hello.Version, hello.Protocol).
			WithHint("It ends a minute after the last intercept of the pod. `kubevpn reset` ends it at once, with " +
				"the intercepts of others.")
	}
	return nil
}

// obey carries out an order. serveControl carries out a reset, after the answer: it ends the stream.
func (s *laptopSession) obey(o *api.AgentOrder) (answer api.AgentReport, err error) {
	kinds := 0
	for _, set := range []bool{o.Claim != nil, o.Release != "", o.Probe != nil, o.Reset, o.Trace != "", o.Names} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		return answer, api.Errorf(api.ExitIncompatible,
			"an order sets one field, and this one sets %d that kubevpn %s knows", kinds, version.String())
	}
	l := s.leader
	switch {
	case o.Claim != nil:
		err = l.claim(o.Claim, s)
	case o.Probe != nil:
		err = l.expect(o.Probe)
	case o.Trace != "":
		answer.Trace, err = l.trace(o, s.owner)
	case o.Names:
		answer.Names, err = readNames(resolvConf, hostsFile, l.own)
	case o.Release != "":
		l.mu.Lock()
		defer l.mu.Unlock()
		l.release(func(c *claim) bool { return c.owner == s.owner && c.id == o.Release })
	}
	return answer, err
}

// report sends the laptop the state whenever it changes, until ctx or the session ends.
func (s *laptopSession) report(ctx context.Context, out *reporter) error {
	pause := time.NewTimer(reportPause)
	defer pause.Stop()
	for {
		over, changed, err := out.state(s)
		if over || err != nil {
			return err
		}
		pause.Reset(reportPause)
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		select { // collects changes
		case <-pause.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// reporter writes reports, one at a time. Its methods may be called concurrently.
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

// state sends the state if it differs from the last one, or the error that ends the session. It holds the lock while it
// reads the state, so that the report after the answer to an order contains that order's effect.
func (r *reporter) state(s *laptopSession) (over bool, changed <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	state, why, changed := s.leader.state(s)
	if why != nil {
		return true, changed, r.to.Encode(api.AgentReport{Error: why})
	}
	if reflect.DeepEqual(state, r.told) {
		return false, changed, nil
	}
	r.told = state
	return false, changed, r.to.Encode(api.AgentReport{State: state})
}
