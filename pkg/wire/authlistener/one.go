package authlistener

import "net"

// One returns a listener that accepts conn and no other one. It ends when closed is closed.
func One(conn net.Conn, closed <-chan struct{}) net.Listener { return &one{Conn: conn, closed: closed} }

type one struct {
	net.Conn
	closed   <-chan struct{}
	accepted bool
}

func (l *one) Accept() (net.Conn, error) {
	if !l.accepted {
		l.accepted = true
		return l.Conn, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}

func (l *one) Addr() net.Addr { return l.LocalAddr() }
