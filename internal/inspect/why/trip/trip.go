// Package trip sends one marked HTTP request, and records what a program can see of its way: the resolver's answer, the
// interface, the connection and the answer. It needs no Kubernetes, so that it also runs in a pod: `traffic trip`.
package trip

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sockets"
	"kubevpn/pkg/wire/transport"
)

const (
	lookupTimeout = 2 * time.Second
	dialTimeout   = 2 * time.Second
	maxBody       = 512 // bytes of the answer that are kept
	maxHeader     = 64 << 10
)

// Mark gives a request a random trace ID of 32 hexadecimal digits, and keeps a traceparent that it has.
func Mark(r *http.Request) {
	id := make([]byte, 16)
	rand.Read(id) // it never fails
	trace := hex.EncodeToString(id)
	r.Header.Set(api.TraceHeader, trace)
	if r.Header.Get(api.TraceParent) == "" {
		r.Header.Set(api.TraceParent, "00-"+trace+"-"+trace[:16]+"-01")
	}
}

// Step is the result of one step. The zero Step was not made.
type Step struct {
	Done    bool           `json:"done,omitempty"` // it succeeded
	Failure transport.Code `json:"failure,omitempty"`
	Error   string         `json:"error,omitempty"`
	Seconds float64        `json:"seconds,omitempty"`
}

// Tried reports whether the step was made.
func (s Step) Tried() bool { return s.Done || s.Failure != transport.CodeOK }

// Refused reports that a reset or an ICMP error came back at once.
func (s Step) Refused() bool { return s.Failure == transport.CodeRefused }

// TimedOut reports that nobody answered.
func (s Step) TimedOut() bool { return s.Failure == transport.CodeTimeout }

// Unreachable reports that there is no route, or that an ICMP error says so.
func (s Step) Unreachable() bool {
	return slices.Contains([]transport.Code{transport.CodeHostUnreachable, transport.CodeNetUnreachable,
		transport.CodeProhibited}, s.Failure)
}

// Result is what a trip saw.
type Result struct {
	Lookup      Step         `json:"lookup"` // not tried for an address
	Addresses   []netip.Addr `json:"addresses,omitempty"`
	Nameservers []string     `json:"nameservers,omitempty"` // that were asked; none: a file answered, or it is unknown
	Resolver    []string     `json:"resolver,omitempty"`    // the lines search and options of resolv.conf

	To     netip.AddrPort `json:"to,omitzero"`      // the first address
	Device string         `json:"device,omitempty"` // by which the kernel sends to it
	Dial   Step           `json:"dial"`
	// TakenAt is the port of this machine or pod that has accepted the connection, though it was for another one: a
	// redirect, such as a service mesh's, has taken it.
	TakenAt netip.AddrPort `json:"takenAt,omitzero"`

	Answer Step        `json:"answer"` // until the header of the answer
	Status int         `json:"status,omitempty"`
	Header http.Header `json:"header,omitempty"`
	Body   string      `json:"body,omitempty"` // how it begins
}

// send sends the request once. It follows no redirect and does not verify certificates. It ends with the request's
// context, whose deadline bounds the wait for the answer.
func send(r *http.Request) Result {
	var t Result
	ctx, port := r.Context(), Port(r.URL)
	if ip, err := netip.ParseAddr(r.URL.Hostname()); err == nil {
		t.Addresses = []netip.Addr{ip.Unmap()}
	} else {
		t.Addresses, t.Nameservers, t.Lookup = Lookup(ctx, r.URL.Hostname(), "")
		t.Resolver = resolverSettings()
	}
	if len(t.Addresses) == 0 {
		return t
	}
	t.To = netip.AddrPortFrom(t.Addresses[0], port)
	t.Device = deviceTo(t.To)
	conn, step := dial(ctx, t.To.String())
	if t.Dial = step; conn == nil {
		return t
	}
	defer conn.Close()
	t.TakenAt = takenAt(conn, t.To)
	t.exchange(conn, r)
	return t
}

// takenAt returns the address of the socket of this machine that has accepted a connection to another address. The
// kernel lists both ends then: a redirect changes the destination, and not the source.
func takenAt(conn net.Conn, to netip.AddrPort) netip.AddrPort {
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	all, unsupported := sockets.List(func(netip.Addr) bool { return true })
	if err != nil || unsupported != nil { // not Linux
		return netip.AddrPort{}
	}
	for _, s := range all {
		if s.TCP != nil && s.Remote == local && s.Local != to {
			return s.Local
		}
	}
	return netip.AddrPort{}
}

// resolverSettings returns the lines of resolv.conf that decide which names are asked.
func resolverSettings() (lines []string) {
	text, _ := os.ReadFile("/etc/resolv.conf") // without it, there are none
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && (f[0] == "search" || f[0] == "options") {
			lines = append(lines, strings.Join(f, " "))
		}
	}
	return lines
}

// Port returns the port of a URL, or that of its scheme.
func Port(u *url.URL) uint16 {
	usual := map[string]string{"http": "80", "https": "443"}
	port, _ := strconv.ParseUint(cmp.Or(u.Port(), usual[u.Scheme]), 10, 16) // 0: there is no such port
	return uint16(port)
}

// Lookup resolves a name as programs of this machine do, or at a nameserver (ADDRESS:PORT). It returns the nameservers
// that were asked.
func Lookup(ctx context.Context, name, nameserver string) (addresses []netip.Addr, asked []string, s Step) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	var mu sync.Mutex
	r := net.Resolver{
		// Elsewhere, Go's own resolver does not know which nameserver the system uses for a name.
		PreferGo: runtime.GOOS == "linux" || nameserver != "",
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if nameserver != "" {
				address = nameserver
			}
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, address)
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}
	began := time.Now()
	addresses, err := r.LookupNetIP(ctx, "ip", name)
	for i, a := range addresses {
		addresses[i] = a.Unmap()
	}
	mu.Lock()
	defer mu.Unlock()
	return slices.Compact(addresses), slices.Clone(asked), stepOf(err, began)
}

// deviceTo returns the interface by which the kernel sends to an address, or "".
func deviceTo(to netip.AddrPort) string {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to)) // sends nothing
	if err != nil {
		return ""
	}
	defer conn.Close()
	source := conn.LocalAddr().(*net.UDPAddr).IP
	interfaces, _ := net.Interfaces() // none: the device is unknown
	for _, i := range interfaces {
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			if network, ok := a.(*net.IPNet); ok && network.IP.Equal(source) {
				return i.Name
			}
		}
	}
	return ""
}

// Dial connects to an address. For localhost it tries 127.0.0.1 and then ::1, as intercepts do.
func Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	port, here := strings.CutPrefix(address, "localhost:")
	if !here {
		return d.DialContext(ctx, network, address)
	}
	conn, err := d.DialContext(ctx, network, "127.0.0.1:"+port)
	if errors.Is(err, syscall.ECONNREFUSED) {
		if conn, err := d.DialContext(ctx, network, "[::1]:"+port); err == nil {
			return conn, nil
		}
	}
	return conn, err
}

// dial connects within dialTimeout.
func dial(ctx context.Context, to string) (net.Conn, Step) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	began := time.Now()
	conn, err := Dial(ctx, "tcp", to)
	return conn, stepOf(err, began)
}

// Try connects to an address, and disconnects at once.
func Try(ctx context.Context, to string) Step {
	conn, s := dial(ctx, to)
	if conn != nil {
		conn.Close()
	}
	return s
}

// exchange sends the request on the connection.
func (t *Result) exchange(conn net.Conn, r *http.Request) {
	began := time.Now()
	rt := &http.Transport{
		// A second request on the connection would fail.
		DialContext:            func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		TLSClientConfig:        &tls.Config{InsecureSkipVerify: true},
		MaxResponseHeaderBytes: maxHeader, DisableKeepAlives: true, DisableCompression: true,
	}
	resp, err := rt.RoundTrip(r)
	t.Answer = stepOf(err, began)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	t.Status, t.Header = resp.StatusCode, resp.Header
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxBody)) // what came is enough
	t.Body = string(body)
}

// stepOf returns the Step of an error, which may be nil.
func stepOf(err error, began time.Time) Step {
	s := Step{Seconds: time.Since(began).Seconds(), Done: err == nil}
	if !s.Done {
		s.Failure, s.Error = transport.CodeOf(err), transport.Describe(err)
	}
	return s
}
