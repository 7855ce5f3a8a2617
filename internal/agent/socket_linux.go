package agent

import (
	"context"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
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
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("cannot identify the peer: %w", err)
	}
	var who *unix.Ucred
	var asked error
	if err := raw.Control(func(fd uintptr) {
		who, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("cannot identify the peer: %w", err)
	}
	if asked != nil {
		return fmt.Errorf("cannot identify the peer: %w", asked)
	}
	if own := os.Geteuid(); int(who.Uid) != own {
		return fmt.Errorf("process %d runs as user %d, this agent as user %d", who.Pid, who.Uid, own)
	}
	return nil
}
