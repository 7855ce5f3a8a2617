package agent

import (
	"context"
	"fmt"
	"net"
	"os"
	"syscall"

	"kubevpn/pkg/host/unixsocket"
)

// listenAgents binds the socket of the leader. It fails with EADDRINUSE if there is one.
func listenAgents(ctx context.Context, name string) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "unix", name)
}

// dialAgent connects to the leader. It fails unless the leader runs as the same user.
func dialAgent(ctx context.Context, name string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", name)
	if err != nil {
		return nil, err
	}
	if err := sameUser(conn); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// sameUser returns an error unless the peer runs as this process's user: other processes of the pod must not decide who
// gives orders. An abstract socket has no permissions of its own.
func sameUser(conn net.Conn) error {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return fmt.Errorf("cannot identify the peer of a %T", conn)
	}
	who, err := unixsocket.Peer(c)
	if err != nil {
		return err
	}
	if own := os.Geteuid(); int(who.Uid) != own {
		return fmt.Errorf("process %d runs as user %d, this agent as user %d", who.Pid, who.Uid, own)
	}
	return nil
}
