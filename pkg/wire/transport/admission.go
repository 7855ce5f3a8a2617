package transport

import (
	"errors"
	"sync/atomic"
	"time"
)

const (
	pendingGrace = 15 * time.Second // for which a pending session without a conn is kept
	pendingTime  = time.Minute      // until Session.Admit: several round trips and retransmissions of a slow line
)

// errEvicted ends a conn or a session for which a newer one, or one of another user, needs the room.
var errEvicted = errors.New("another needs the room")

// user is what the admitted sessions of one user share. Server.mu guards sessions.
type user struct {
	sessions      int // that have not given their share of the budget back
	places, bytes atomic.Int64
}

// Admit ends the pending time of a session of a server with ServerConfig.Admission, once the caller knows whose session
// it is. All sessions of a user have one part of the budget. Beyond MaxSessions, the user with the most sessions loses
// the oldest one, at first of those without a conn. If each user has one session, the oldest without a conn ends. If
// there is none, Admit returns ErrServerFull, and the caller should close the session. Call it once.
func (s *Session) Admit(name string) error {
	if s.admit == nil {
		return nil
	}
	return s.admit(name)
}

// enter prepares a new session. Call with mu held.
func (s *Server) enter(session *Session) error {
	session.grace = s.cfg.Grace
	if s.cfg.Admission {
		session.grace = pendingGrace
		session.admit = func(name string) error { return s.admit(session, name) }
		if _, err := s.victim(session, new(user)); err != nil { // nobody could be admitted
			return err
		}
	}
	if err := s.makeRoom(session); err != nil {
		return err
	}
	if s.cfg.Admission {
		session.pending = time.AfterFunc(pendingTime, func() { session.fail(ErrSessionLost) })
	}
	session.graceTimer = time.AfterFunc(session.grace, session.expire)
	return nil
}

func (s *Server) admit(session *Session, name string) error {
	s.mu.Lock()
	u := s.users[name]
	if u == nil {
		u = new(user)
	}
	session.user, session.userName = u, name
	if err := s.makeRoom(session); err != nil {
		session.user = nil
		s.mu.Unlock()
		return err
	}
	s.users[name] = u
	u.sessions++
	session.pending.Stop()
	s.mu.Unlock()
	session.places.join(&u.places)
	session.bytes.join(&u.bytes)

	session.mu.Lock()
	defer session.mu.Unlock()
	session.grace = s.cfg.Grace
	if session.up == 0 && session.err == nil {
		session.graceTimer.Reset(session.grace)
	}
	return nil
}

// makeRoom ends a session if there are MaxSessions of the phase of the new one, which becomes one of them. Call with mu
// held.
func (s *Server) makeRoom(session *Session) error {
	victim, err := s.victim(session, session.user)
	if victim != nil {
		delete(s.sessions, victim.id)
		s.wg.Go(func() { victim.fail(errEvicted) })
	}
	return err
}

// victim returns the session that must end so that the new one becomes one of u, or a pending one if u is nil. It
// returns nil if there is room.
func (s *Server) victim(session *Session, u *user) (victim *Session, err error) {
	count, most, total := map[*user]int{u: 1}, u, 1
	for _, other := range s.sessions {
		if other == session || (other.user == nil) != (u == nil) {
			continue
		}
		total++
		if count[other.user]++; count[other.user] > count[most] {
			most = other.user
		}
	}
	if total <= s.cfg.MaxSessions {
		return nil, nil
	}
	crowd := count[most] > 1 && s.cfg.Admission // its sessions may end although they have conns
	attached := true
	for _, other := range s.sessions {
		if other == session || (other.user == nil) != (u == nil) || crowd && other.user != most {
			continue
		}
		up := other.Attached()
		if up && !crowd {
			continue
		}
		if victim == nil || attached && !up || attached == up && other.since.Before(victim.since) {
			victim, attached = other, up
		}
	}
	if victim == nil {
		return nil, ErrServerFull
	}
	return victim, nil
}

// remove forgets a session that has ended.
func (s *Server) remove(session *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[session.id] == session {
		delete(s.sessions, session.id)
	}
	if session.pending != nil {
		session.pending.Stop()
	}
}

// leave ends a session's part in its user, after Session.settle.
func (s *Server) leave(session *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := session.user; u != nil {
		if u.sessions--; u.sessions == 0 {
			delete(s.users, session.userName)
		}
	}
}
