//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"kubevpn/internal/api"
)

// Agents of one pod exchange these JSON lines over api.AgentSocket. They may be of different versions: the names of the
// fields stay, so that a standby's owner always learns the leader's version.
//
//	standby                    leader
//	  │ registration ───────────▶│
//	  │◀───────────────── message│   Info, or Error
//	  │◀───────────────── message│   End: the owner was forgotten, or everything reset
//	  │          (silence)       │   the connection ends with the leader
type registration struct {
	Owner  string          `json:"owner"`            // api.AgentOwnerVariable
	Name   string          `json:"name"`             // api.AgentNameVariable
	Listen []api.AgentPort `json:"listen,omitempty"` // ports of a sidecar, on which the leader listens for it
}

type message struct {
	Info  *api.AgentInfo `json:"greeting,omitempty"`
	Error *api.Error     `json:"error,omitempty"`
	End   bool           `json:"end,omitempty"`
}

const (
	maxMessage = 16 << 10 // bytes
	// messageTimeout bounds the wait for a registration, and for its answer.
	messageTimeout = 5 * time.Second
)

// standby is the leader's end of the connection to another agent of the pod.
type standby struct {
	conn net.Conn
	once sync.Once
}

// dismiss tells the agent to end. It does not wait.
func (s *standby) dismiss() {
	s.once.Do(func() {
		// It fits into the socket's buffer. If it does not arrive, that agent takes over, and soon ends because it is
		// alone.
		s.conn.SetWriteDeadline(time.Now().Add(time.Second))
		json.NewEncoder(s.conn).Encode(message{End: true})
		s.conn.Close()
	})
}

// close lets the agent try to become the leader.
func (s *standby) close() { s.once.Do(func() { s.conn.Close() }) }

// serveStandbys registers agents that connect, until the listener is closed.
func (l *leader) serveStandbys(agents net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := agents.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			if err := l.serveStandby(&standby{conn: conn}); err != nil {
				l.log.Info("cannot serve a standby", "err", err)
			}
		})
	}
}

// serveStandby serves one agent's connection until it ends.
func (l *leader) serveStandby(s *standby) error {
	defer s.close()
	defer context.AfterFunc(l.live, s.close)()
	if err := s.conn.SetDeadline(time.Now().Add(messageTimeout)); err != nil {
		return fmt.Errorf("waiting for a registration: %w", err)
	}
	var r registration
	if err := api.NewLines(s.conn, maxMessage).Next(&r); err != nil {
		return fmt.Errorf("reading a registration: %w", err)
	}
	o, err := l.addStandby(s, r)
	if err != nil {
		return errors.Join(err, json.NewEncoder(s.conn).Encode(message{Error: api.AsError(err)}))
	}
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(o.standbys, s)
	}()
	// The standby's owner looks for the key in this agent's log, of which the kubelet may have dropped the beginning.
	if err := l.announce(); err != nil {
		return err
	}
	if err := json.NewEncoder(s.conn).Encode(message{Info: &l.info}); err != nil {
		return fmt.Errorf("answering a standby: %w", err)
	}
	if err := s.conn.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("waiting for a standby's end: %w", err)
	}
	_, _ = io.Copy(io.Discard, s.conn) // the standby sends nothing more; wait for its end
	return nil
}

// addStandby registers an agent's owner, and listens for its sidecar.
func (l *leader) addStandby(s *standby, r registration) (*owner, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending {
		return nil, errEnding
	}
	if len(r.Listen) > maxPorts {
		return nil, api.Errorf(api.ExitUsage, "a sidecar has at most %d ports", maxPorts)
	}
	for _, p := range r.Listen {
		if err := checkSidecar(p); err != nil {
			return nil, api.Errorf(api.ExitUsage, "%+v is not a port of a sidecar: %w", p, err)
		}
	}
	for _, p := range r.Listen {
		if err := l.receiver.listen(portOf(p), p.Listen); err != nil {
			return nil, err
		}
	}
	o, err := l.register(r.Owner, r.Name)
	if err != nil {
		return nil, err
	}
	o.sidecar = o.sidecar || len(r.Listen) > 0
	o.standbys[s] = struct{}{}
	return o, nil
}

// errForgotten ends a standby whose owner the leader has forgotten.
var errForgotten = errors.New("the leader has forgotten the owner")

// standBy registers at the leader, announces the leader's info, and waits. It returns errForgotten, an error of the
// registration, or nil when the leader or ctx has ended.
func standBy(ctx context.Context, conn net.Conn, r registration, announce func(api.AgentInfo) error) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := conn.SetDeadline(time.Now().Add(messageTimeout)); err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	lines := api.NewLines(conn, maxMessage)
	for registered := false; ; {
		var m message
		err := lines.Next(&m)
		switch {
		case err != nil && (ctx.Err() != nil || registered && connEnded(err)):
			return nil // the socket shows who is the leader now
		case err != nil:
			return fmt.Errorf("reading the leader's answer: %w", err)
		case m.End:
			return errForgotten
		case m.Error != nil:
			return m.Error
		case m.Info != nil:
			if err := announce(*m.Info); err != nil {
				return err
			}
			registered = true
			if err := conn.SetDeadline(time.Time{}); err != nil {
				return fmt.Errorf("standing by: %w", err)
			}
		}
	}
}

// connEnded reports whether err means that the connection has ended, not that a message is malformed.
func connEnded(err error) bool {
	var network *net.OpError
	return errors.Is(err, io.EOF) || errors.As(err, &network)
}
