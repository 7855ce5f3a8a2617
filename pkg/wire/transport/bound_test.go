package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// bound is a listener whose conns are for one session.
type bound struct {
	net.Listener
	session SessionID
}

type boundConn struct {
	net.Conn
	session SessionID
}

func (c boundConn) OnlySession() SessionID { return c.session }

func (l bound) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return boundConn{c, l.session}, nil
}

func localListener(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// sendHello sends a hello over a new connection and returns the status of the reply, or io.EOF if there is none.
func sendHello(t *testing.T, l net.Listener, h hello) (status, error) {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write(marshalHandshake(h)); err != nil {
		t.Fatal(err)
	}
	var one [1]byte
	if _, err := io.ReadFull(c, one[:]); err != nil {
		return 0, err
	}
	r, err := readHandshake[reply](io.MultiReader(bytes.NewReader(one[:]), c))
	if err != nil {
		t.Fatal(err)
	}
	return r.Status, nil
}

// A conn that is bound to one session resumes and creates links only of that session.
func TestBoundConnCannotJoinAnotherSession(t *testing.T) {
	alice, bob, nobody := SessionID{1}, SessionID{2}, SessionID{3}
	anyone, forAlice, forNobody := localListener(t), bound{localListener(t), alice}, bound{localListener(t), nobody}
	refused := make(chan error, 10)
	s := NewServer(ServerConfig{OnRefused: func(_ net.Conn, err error) { refused <- err }})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, anyone, forAlice, forNobody) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	for _, test := range []struct {
		name   string
		l      net.Listener
		hello  hello
		status status
		reason error // with which the server rejects the conn
	}{
		{"begins", anyone, hello{Session: alice, Token: token{1}, Flags: flagFirst, Attempt: 1}, statusOK, nil},
		{"another-begins", anyone, hello{Session: bob, Token: token{2}, Flags: flagFirst, Attempt: 1}, statusOK, nil},
		{"resumes", forAlice, hello{Session: alice, Token: token{1}, Attempt: 2}, statusOK, nil},
		{"new-link", forAlice, hello{Session: alice, Token: token{1}, Link: 1, Flags: flagFirst, Attempt: 1}, statusOK, nil},
		{"wrong-token", forAlice, hello{Session: alice, Token: token{2}, Attempt: 3}, statusRefused, ErrRefused},
		{"makes-none", forNobody, hello{Session: nobody, Token: token{3}, Flags: flagFirst, Attempt: 1}, statusUnknown, ErrSessionLost},
	} {
		status, err := sendHello(t, test.l, test.hello)
		if err != nil || status != test.status {
			t.Errorf("%s: status %d, %v, want %d", test.name, status, err, test.status)
		}
		if test.reason != nil {
			if err := <-refused; !errors.Is(err, test.reason) {
				t.Errorf("%s: rejected with %v, want %v", test.name, err, test.reason)
			}
		}
	}
	for _, test := range []struct {
		name string
		h    hello
	}{
		{"known", hello{Session: bob, Token: token{2}, Attempt: 2}},
		{"unknown", hello{Session: SessionID{9}, Token: token{9}, Flags: flagFirst, Attempt: 1}},
	} {
		if status, err := sendHello(t, forAlice, test.h); !errors.Is(err, io.EOF) {
			t.Errorf("%s: got status %d, %v, want an end without an answer", test.name, status, err)
		}
		if err := <-refused; !errors.Is(err, ErrOtherSession) {
			t.Errorf("%s: rejected with %v", test.name, err)
		}
	}
	if n := len(s.Sessions()); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
}

// Serve ends when one of its listeners fails.
func TestServeEndsWithAListener(t *testing.T) {
	a, b := localListener(t), localListener(t)
	done := make(chan error, 1)
	go func() { done <- NewServer(ServerConfig{}).Serve(t.Context(), a, b) }()
	b.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve gave %v", err)
	}
	if _, err := a.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the other listener is open: %v", err)
	}
}
