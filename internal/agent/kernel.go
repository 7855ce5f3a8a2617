package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"

	"kubevpn/pkg/redirect"
)

// mark is on the agent's own sockets, packets and connections, and mark+1 too ("kva" and a number). All agents of a pod have
// the same, as one may still be draining while the next one begins.
const mark = 0x6b766100

// redirectConfig is what the redirects of this process are made with, or those of the agent whose guardian it is. Agents that
// follow each other are in different containers, and each is process 1 there; so it is not the process that their name is made
// of.
func redirectConfig(log *slog.Logger) redirect.Config {
	name := os.Getenv(guardedVariable)
	if name == "" {
		var random [4]byte
		rand.Read(random[:]) // it never fails
		name = "kubevpn-agent-" + hex.EncodeToString(random[:])
	}
	return redirect.Config{
		Name: name, Mark: mark, Logger: log,
		Programs: "/usr/sbin", Backend: redirect.Backend(os.Getenv(backendVariable)),
	}
}

// openKernel makes the table of redirects, or what the kernel has instead of it.
func openKernel(log *slog.Logger) (kernel, error) {
	r, err := redirect.New(redirectConfig(log))
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(context.Background())
	k := &redirects{Redirects: r, stop: stop}
	k.running.Go(func() { r.Run(running) })
	if err := r.Transparent(); err != nil {
		log.Info("the application sees the agent's address, and clients' in X-Forwarded-For", "why", err)
		k.opaque = err
	}
	return k, nil
}

// redirects is pkg/redirect as a kernel.
type redirects struct {
	*redirect.Redirects
	opaque  error // why clients' addresses are not kept
	stop    context.CancelFunc
	running sync.WaitGroup
}

func (k *redirects) Close() error {
	k.stop()
	k.running.Wait()
	return k.Redirects.Close()
}

func (k *redirects) Set(to map[port]uint16) error {
	ports := make(map[redirect.Port]uint16, len(to))
	for p, local := range to {
		ports[redirect.Port(p)] = local
	}
	return k.Redirects.Set(ports)
}

func (k *redirects) Flush(ports []port) (int, error) {
	all := make([]redirect.Port, len(ports))
	for i, p := range ports {
		all[i] = redirect.Port(p)
	}
	return redirect.Flush(all)
}

func (k *redirects) Original(conn net.Conn) (netip.AddrPort, error) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("asking where a connection was for: it is a %T", conn)
	}
	return redirect.OriginalDestination(c)
}

func (k *redirects) Dial(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error) {
	if network == "udp" {
		return k.DialUDPFrom(ctx, client, to)
	}
	return k.DialFrom(ctx, client, to)
}

func (k *redirects) Opaque() error { return k.opaque }
