package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
	"kubevpn/pkg/wakeup"
)

const (
	// lockSocket is an abstract unix socket that a gateway holds as long as it runs, so that a pod has one gateway.
	lockSocket = "@kubevpn-gateway-lock"
	// lockFile is the lock of iptables-legacy. Its default directory, /run, is read-only in the container; /dev never
	// is.
	lockFile = "/dev/kubevpn-xtables.lock"
	// programs is the directory of iptables-nft and its like.
	programs = "/usr/sbin"
	// maxMessage is the largest message of the manager, in bytes.
	maxMessage = 64 << 10

	// The backoff between attempts to dial the manager grows from first to last.
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
	// sendTimeout bounds a write to the manager.
	sendTimeout = 10 * time.Second
)

func run(ctx context.Context, log *slog.Logger) error {
	if err := os.Setenv("XTABLES_LOCKFILE", lockFile); err != nil {
		return fmt.Errorf("choosing the lock of iptables: %w", err)
	}
	return (&gateway{log: log, tun: tunPath, programs: programs}).run(ctx)
}

// gateway serves one manager after the other. It changes the network namespace only in run's goroutine.
type gateway struct {
	log      *slog.Logger
	tun      string // path of the TUN devices' file
	programs string
}

// run serves until ctx ends, and then returns nil. It returns an error when this container can never serve.
func (g *gateway) run(ctx context.Context) error {
	lock, err := new(net.ListenConfig).Listen(ctx, "unix", lockSocket)
	if errors.Is(err, unix.EADDRINUSE) {
		return api.Errorf(api.ExitNetstack, "another gateway serves this pod")
	} else if err != nil {
		return fmt.Errorf("listening on %s: %w", lockSocket, err)
	}
	defer lock.Close()
	if err := ensureTUN(g.tun); err != nil {
		return err
	}
	if err := removeDevice(); err != nil {
		return api.Errorf(api.ExitNetwork, "%w", err)
	}
	firewall, err := openFirewall(g.programs, g.log)
	if err != nil {
		return err
	}
	g.log.Info("gateway", "backend", firewall.backend, "ip6tables", firewall.v6 != nil)
	for retry := firstRetry; ctx.Err() == nil; retry = min(2*retry, lastRetry) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", api.GatewaySocket)
		if err == nil {
			var served bool
			if served, err = g.serve(ctx, conn.(*net.UnixConn), firewall); served {
				retry = firstRetry
			}
			if err != nil {
				g.log.Warn("cannot serve the traffic manager", "err", err)
			}
			if ctx.Err() != nil {
				return err
			}
		} else {
			g.log.Debug("the traffic manager does not listen", "err", err)
		}
		wakeup.Pause(ctx, retry)
	}
	return nil
}

// serve configures the networks that the manager sends, until the connection ends, and then removes everything. served
// reports whether the manager got the device.
func (g *gateway) serve(ctx context.Context, conn *net.UnixConn, firewall *firewall) (served bool, err error) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	manager := unixsocket.NewConn(conn, maxMessage)
	networks, err := next(manager)
	if networks == nil {
		return false, unlessEnded(ctx, err)
	}
	n, file, err := openNetwork(firewall, g.log)
	if err != nil {
		return false, fmt.Errorf("cannot create the device: %w", err)
	}
	defer func() { err = errors.Join(err, n.close()) }()
	err = n.set(networks.Networks)
	sent := n.state()
	if err == nil {
		err = send(manager, sent, file)
	}
	// From here on the manager owns the device: the kernel removes it as soon as the manager ends.
	if err := errors.Join(err, file.Close()); err != nil {
		return false, unlessEnded(ctx, err)
	}
	g.log.Info("the traffic manager has the device", "device", device, "mtu", n.mtu, "networks", n.have, "ipv6", n.ipv6,
		"warnings", n.warnings)
	for {
		networks, err := next(manager)
		if networks == nil {
			if err = unlessEnded(ctx, err); err == nil && ctx.Err() == nil {
				g.log.Info("the traffic manager ended the connection")
			}
			return true, err
		}
		if err := n.set(networks.Networks); err != nil {
			return true, err
		}
		g.log.Info("new networks", "networks", n.have)
		if now := n.state(); !slices.Equal(now.Addrs, sent.Addrs) {
			if err := send(manager, now, nil); err != nil {
				return true, unlessEnded(ctx, err)
			}
			sent = now
		}
	}
}

// next reads the manager's next message. It returns nil at the end of the connection, with an error unless the manager
// closed it.
func next(manager *unixsocket.Conn) (*api.GatewayNetworks, error) {
	var networks api.GatewayNetworks
	switch _, err := manager.Receive(&networks, ""); {
	case err == io.EOF:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("cannot read from the traffic manager: %w", err)
	}
	return &networks, nil
}

// send sends the state, with the device's descriptor unless file is nil.
func send(manager *unixsocket.Conn, state api.Gateway, file syscall.Conn) error {
	err := manager.SetWriteDeadline(time.Now().Add(sendTimeout))
	if err == nil {
		err = manager.Send(state, file)
	}
	if err != nil {
		return fmt.Errorf("cannot write to the traffic manager: %w", err)
	}
	return nil
}

// unlessEnded drops the error that ending ctx causes.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
