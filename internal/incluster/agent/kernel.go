//go:build linux

package agent

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"kubevpn/pkg/host/redirect"
	"kubevpn/pkg/protocol/httpmatch"
)

// mark and mark+1 mark the agent's own sockets, packets and connections ("kva" and a number). All agents of a pod use
// the same, because one may still be draining when the next one starts.
const mark = 0x6b766100

// openKernel creates the table of redirects. Its name is random, because agents that follow each other in a pod have
// the same process ID, each in its container.
func openKernel(cfg Config) (kernel, error) {
	log, checks := cfg.Logger, redirect.Checks{From: cfg.CheckedFrom}
	for _, c := range cfg.Pod.Checks {
		if c.Scheme == httpmatch.CheckConnect && !slices.Contains(checks.Ports, c.Port) {
			checks.Ports = append(checks.Ports, c.Port)
		}
	}
	var random [4]byte
	rand.Read(random[:]) // it never fails
	r, err := redirect.New(redirect.Config{Name: "kubevpn-agent-" + hex.EncodeToString(random[:]), Mark: mark,
		Checks: checks, Within: cfg.Pod.Within, Exempt: cfg.Pod.Users, Logger: log})
	if err != nil {
		return nil, err
	}
	k := &redirects{Redirects: r}
	if err := r.Transparent(); err != nil {
		log.Info("the application sees the agent's address, and clients' in X-Forwarded-For", "reason", err)
		k.opaque = err
	}
	return k, nil
}

// redirects implements kernel with pkg/host/redirect.
type redirects struct {
	*redirect.Redirects
	opaque error // why clients' addresses are not kept
}

func (k *redirects) Flush(ports []port) (int, error) { return redirect.Flush(ports, mark) }

func (k *redirects) Open(ports []port) ([]netip.AddrPort, error) { return redirect.Open(ports, mark) }

func (k *redirects) Original(conn net.Conn) (netip.AddrPort, error) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("cannot read the original destination of a %T", conn)
	}
	return redirect.OriginalDestination(c)
}

func (k *redirects) Opaque() error { return k.opaque }
