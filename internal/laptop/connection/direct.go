package connection

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podconn"
	"kubevpn/pkg/wakeup"
)

// The transport direct dials the manager's proxy port without the API server, at the addresses that the manager names:
// its pod's, those of a node port, or those of a load balancer. It sends what the API server would pass on:
//
//	laptop ── TCP ──▶ pod, node port or load balancer ──▶ port 10802 of the pod
//	  GET / with the ticket's secret ▶
//	  ◀ 101, if the secret belongs to the session
//	  ═══════════ TLS 1.3, a certificate at each end ═══════════
//
// A program on the path can read the secret, but cannot use it without the key of the ticket's certificate.
//
// The addresses come from the cluster, and nothing verifies them before TLS. The laptop dials none that is special or
// its own, and none that its own routes would send through the tunnel: that conn would carry itself. The plan keeps an
// address out of the tunnel once the laptop has reached it (see known).

const (
	directTimeout  = 3 * time.Second // of a dial, to all addresses at once
	connectTimeout = time.Second     // of its TCP connections: meanwhile, api-proxy is not tried
	lookupTimeout  = time.Second
	maxLookedUp    = 4       // addresses of one load balancer's name
	maxSwitch      = 1 << 10 // bytes of the answer to the upgrade
	maxReachedKept = 2 * api.MaxDirect
)

// direct knows how to reach the manager without the API server. Tests replace its functions.
type direct struct {
	*shared
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	refuse func(netip.AddrPort) string // why the laptop does not dial an address, or ""
	// source returns the address from which this machine sends to another one.
	source func(netip.AddrPort) (netip.Addr, error)
}

func newDirect(s *shared) *direct {
	return &direct{
		shared: s, refuse: refuseOutside, source: sourceFor,
		lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		},
	}
}

// parseDirect reads an address that the manager names. Either host, a DNS name, or addr's address is set.
func parseDirect(text string) (host string, addr netip.AddrPort, err error) {
	host, portText, err := net.SplitHostPort(text)
	if err != nil {
		return "", netip.AddrPort{}, fmt.Errorf("%q is not HOST:PORT", text)
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 {
		return "", netip.AddrPort{}, fmt.Errorf("%q has no valid port", text)
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return "", netip.AddrPortFrom(a.Unmap(), uint16(port)), nil
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if !strings.Contains(host, ".") || len(validation.IsDNS1123Subdomain(host)) > 0 {
		return "", netip.AddrPort{}, fmt.Errorf("%q has neither an address nor a DNS name", text)
	}
	return host, netip.AddrPortFrom(netip.Addr{}, uint16(port)), nil
}

// sourceFor returns the address from which this machine sends to another one. It connects a UDP socket, which sends
// nothing.
func sourceFor(to netip.AddrPort) (netip.Addr, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// candidates returns the addresses to dial, and an error that says why it leaves out others.
func (d *direct) candidates(ctx context.Context) (to []netip.AddrPort, left error) {
	named := d.view.Load().state.Direct
	var errs []error
	for _, text := range named[:min(len(named), api.MaxDirect)] {
		host, addr, err := parseDirect(text)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		addrs := []netip.Addr{addr.Addr()}
		if host != "" {
			bounded, cancel := context.WithTimeout(ctx, lookupTimeout)
			addrs, err = d.lookup(bounded, host)
			cancel()
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", text, err))
				continue
			}
		}
		for _, a := range addrs[:min(len(addrs), maxLookedUp)] {
			at := netip.AddrPortFrom(a.Unmap(), addr.Port())
			if why := d.reject(at); why != "" {
				errs = append(errs, fmt.Errorf("%v: %s", at, why))
			} else if !slices.Contains(to, at) {
				to = append(to, at)
			}
		}
	}
	return to, errors.Join(errs...)
}

// reject returns why the laptop does not dial an address now, or "".
func (d *direct) reject(to netip.AddrPort) string {
	if why := d.refuse(to); why != "" {
		return why
	}
	from, err := d.source(to)
	switch {
	case err != nil:
		return api.OneLine(err.Error())
	case d.tunneled(from):
		return throughTunnel
	}
	return ""
}

const throughTunnel = "this machine reaches it through the tunnel only"

// tunneled reports whether packets from the address enter the connection's own tunnel.
func (d *direct) tunneled(from netip.Addr) bool {
	return !d.cfg.isolated() && !d.cfg.proxied() && slices.Contains(d.view.Load().lease.Addrs, from)
}

// connect opens a TCP connection outside of the tunnel. The plan then keeps the address out of the tunnel.
func (d *direct) connect(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	dialer := net.Dialer{Timeout: connectTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	tcp := conn.(*net.TCPConn)
	if d.tunneled(tcp.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()) { // routes have changed since reject
		tcp.Close()
		return nil, fmt.Errorf("%v: %s", to, throughTunnel)
	}
	if !slices.Contains(d.reached.Load(), to.Addr()) {
		d.reached.Update(func(all *[]netip.Addr) {
			*all = append(slices.Clone((*all)[max(0, len(*all)-maxReachedKept+1):]), to.Addr())
		})
		d.changed.Raise()
	}
	return tcp, nil
}

// survey finds out which addresses this machine reaches, before its routes into the tunnel contain them.
func (d *direct) survey(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, directTimeout)
	defer cancel()
	to, left := d.candidates(ctx)
	conn, err := wakeup.First(ctx, len(to), 0, func(ctx context.Context, n int) (net.Conn, error) {
		conn, err := d.connect(ctx, to[n])
		if err != nil {
			return nil, err
		}
		return nil, conn.Close() // and go on with the others
	})
	if conn == nil {
		d.log.Debug("looked for the traffic manager outside of the tunnel", "reached", d.reached.Load(), "err", err,
			"left", left)
	}
}

// dial opens a conn at the address that answers first. upgrade turns a TCP connection to the address into the conn.
func (d *direct) dial(ctx context.Context,
	upgrade func(context.Context, net.Conn, netip.AddrPort) (net.Conn, error)) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, directTimeout)
	defer cancel()
	to, left := d.candidates(ctx)
	conn, err := wakeup.First(ctx, len(to), 0, func(ctx context.Context, n int) (net.Conn, error) {
		to := to[n]
		tcp, err := d.connect(ctx, to)
		if err != nil {
			return nil, err
		}
		conn, err := podconn.Tuned(tcp)
		if err == nil {
			conn, err = upgrade(ctx, conn, to)
		}
		if err != nil {
			tcp.Close()
			return nil, fmt.Errorf("%v: %w", to, err)
		}
		return conn, nil
	})
	switch {
	case conn != nil:
		return conn, nil
	case err == nil && left == nil:
		return nil, api.Errorf(api.ExitUnreachable, "the traffic manager names no address for direct connections")
	}
	return nil, api.Errorf(api.ExitUnreachable, "no direct connection: %s",
		strings.ReplaceAll(errors.Join(left, err).Error(), "\n", "; "))
}

// requestUpgrade sends the ticket on conn, and reads the answer and nothing after it. Until the answer, conn ends with
// ctx.
func requestUpgrade(ctx context.Context, conn net.Conn, ticket string) error {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	request := "GET / HTTP/1.1\r\nHost: kubevpn\r\nConnection: Upgrade\r\nUpgrade: " + api.UpgradeProtocol + "\r\n" +
		api.TicketHeader + ": " + ticket + "\r\n\r\n"
	if _, err := io.WriteString(conn, request); err != nil {
		return err
	}
	err := readSwitch(conn)
	if !stop() {
		return context.Cause(ctx)
	}
	return err
}

var errSilent = errors.New("the connection was closed without an answer")

// readSwitch reads the answer to an upgrade. It reads byte by byte, because TLS follows; r buffers.
func readSwitch(r io.Reader) error {
	var head []byte
	for one := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")); head = append(head, one...) {
		if len(head) == maxSwitch {
			return errors.New("the answer is not from a traffic manager")
		}
		if _, err := io.ReadFull(r, one); err != nil {
			if len(head) == 0 && errors.Is(err, io.EOF) {
				return errSilent
			}
			return err
		}
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols ||
		!strings.EqualFold(resp.Header.Get("Upgrade"), api.UpgradeProtocol) {
		return errors.New("the answer is not from a traffic manager")
	}
	return nil
}

// keptOut returns the addresses to keep out of the tunnel: those that were reached without it and, if one of them is a
// pod's, the address of the current pod.
func keptOut(reached []netip.Addr, state api.ManagerState) []netip.Addr {
	inPod := func(a netip.Addr) bool { return covers(state.PodCIDRs, a) }
	out := slices.Clone(reached)
	if !slices.ContainsFunc(reached, inPod) {
		return out
	}
	for _, text := range state.Direct[:min(len(state.Direct), api.MaxDirect)] {
		if _, addr, err := parseDirect(text); err == nil && inPod(addr.Addr()) {
			out = append(out, addr.Addr())
		}
	}
	return out
}
