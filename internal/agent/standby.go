package agent

import (
	"bufio"
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

// What agents of one pod say to each other over api.AgentSocket, as JSON lines:
//
//	standby                    primary
//	  │ registration ───────────▶│
//	  │◀──────────────── word    │   Greeting, or Error
//	  │◀──────────────── word    │   End: the owner was forgotten, or everything reset
//	  │          (silence)       │   the connection's end is the primary's
type registration struct {
	Owner  string   `json:"owner"`            // api.AgentOwnerVariable
	Name   string   `json:"name"`             // api.AgentNameVariable
	Listen []Listen `json:"listen,omitempty"` // a sidecar's: the primary listens for it, as Services lead there
}

type word struct {
	Greeting *api.AgentGreeting `json:"greeting,omitempty"`
	Error    *api.Error         `json:"error,omitempty"`
	End      bool               `json:"end,omitempty"`
}

const (
	maxWord = 16 << 10 // bytes
	// wordPatience bounds the wait for a registration, and for its answer. Both are there at once, or not at all.
	wordPatience = 5 * time.Second
)

// standby is the primary's end of the connection to another agent of the pod.
type standby struct {
	conn net.Conn
	once sync.Once
}

// dismiss has the agent end. It does not wait.
func (s *standby) dismiss() {
	s.once.Do(func() {
		// It fits into the socket's buffer. If it does not arrive, that agent takes over, and soon finds itself alone.
		s.conn.SetWriteDeadline(time.Now().Add(time.Second))
		json.NewEncoder(s.conn).Encode(word{End: true})
		s.conn.Close()
	})
}

// close has the agent try to be the primary.
func (s *standby) close() { s.once.Do(func() { s.conn.Close() }) }

// serveStandbys registers agents that connect, until the listener is closed.
func (p *primary) serveStandbys(agents net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := agents.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			if err := p.serveStandby(&standby{conn: conn}); err != nil {
				p.log.Info("standby", "err", err)
			}
		})
	}
}

// serveStandby is one agent's connection, until it ends.
func (p *primary) serveStandby(s *standby) error {
	defer s.close()
	stop := context.AfterFunc(p.live, s.close)
	defer stop()
	lines := bufio.NewScanner(s.conn)
	lines.Buffer(nil, maxWord)
	if err := s.conn.SetDeadline(time.Now().Add(wordPatience)); err != nil {
		return fmt.Errorf("waiting for a registration: %w", err)
	}
	var r registration
	if !lines.Scan() {
		return fmt.Errorf("waiting for a registration: %w", errors.Join(lines.Err(), io.ErrUnexpectedEOF))
	}
	if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
		return fmt.Errorf("reading a registration: %w", err)
	}
	o, err := p.take(s, r)
	if err != nil {
		return errors.Join(err, json.NewEncoder(s.conn).Encode(word{Error: api.AsError(err)}))
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(o.standbys, s)
	}()
	if err := json.NewEncoder(s.conn).Encode(word{Greeting: &p.greeting}); err != nil {
		return fmt.Errorf("greeting a standby: %w", err)
	}
	if err := s.conn.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("waiting for a standby's end: %w", err)
	}
	for lines.Scan() { // it says nothing more
	}
	return nil
}

// take makes an agent a standby.
func (p *primary) take(s *standby, r registration) (*owner, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return nil, errEnding
	}
	for _, l := range r.Listen {
		if err := p.plane.listen(port{l.Protocol, l.Port}, l.Listen); err != nil {
			return nil, err
		}
	}
	o, err := p.register(r.Owner, r.Name)
	if err != nil {
		return nil, err
	}
	o.stays = o.stays || len(r.Listen) > 0
	o.standbys[s] = struct{}{}
	return o, nil
}

// errForgotten ends a standby whose owner the primary has forgotten.
var errForgotten = errors.New("the primary has forgotten the owner")

// standBy registers at the primary, prints its greeting, and waits. It ends with errForgotten, with an error of the
// registration, or with nil when the primary has gone, or ctx.
func standBy(ctx context.Context, conn net.Conn, r registration, greet func(api.AgentGreeting) error) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(wordPatience)); err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, maxWord)
	greeted := false
	for lines.Scan() {
		var w word
		if err := json.Unmarshal(lines.Bytes(), &w); err != nil {
			return fmt.Errorf("reading the primary's word: %w", err)
		}
		switch {
		case w.End:
			return errForgotten
		case w.Error != nil:
			return w.Error
		case w.Greeting != nil:
			if err := greet(*w.Greeting); err != nil {
				return err
			}
			greeted = true
			if err := conn.SetDeadline(time.Time{}); err != nil {
				return fmt.Errorf("standing by: %w", err)
			}
		}
	}
	if !greeted && ctx.Err() == nil {
		return fmt.Errorf("the primary has not greeted: %w", errors.Join(lines.Err(), io.ErrUnexpectedEOF))
	}
	return nil // however the connection ended: the socket says who is the primary
}
