//go:build linux

package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kubevpn/pkg/protocol/interceptor"
)

// podListeners are the addresses at which a pod listens, and its kernel.
type podListeners []netip.AddrPort

func (p *podListeners) set(addrs ...string) {
	*p = nil
	for _, a := range addrs {
		*p = append(*p, netip.MustParseAddrPort(a))
	}
}

func (p *podListeners) read() ([]netip.AddrPort, error) { return *p, nil }

func (p *podListeners) dial(_ context.Context, _ string, _ netip.Addr, to netip.AddrPort) (net.Conn, error) {
	if !slices.ContainsFunc(*p, func(l netip.AddrPort) bool {
		return l == to || l.Port() == to.Port() && l.Addr().IsUnspecified()
	}) {
		return nil, fmt.Errorf("dial %v: %w", to, syscall.ECONNREFUSED)
	}
	near, far := net.Pipe()
	far.Close()
	return &dialed{near, to}, nil
}

type dialed struct {
	net.Conn
	to netip.AddrPort
}

func TestApplicationIsReachedAtLoopbackOnlyIfItListensThereAlone(t *testing.T) {
	const (
		loopback = "127.0.0.1:8080"
		pod      = "10.0.0.9:8080"
	)
	for _, tt := range []struct {
		name   string
		before []string // listeners when the port is claimed
		now    []string
		want   string // "" is a refusal
	}{
		{"it listens at loopback alone", []string{loopback}, []string{loopback}, loopback},
		{"at IPv6 loopback alone", []string{"[::1]:8080"}, []string{"[::1]:8080"}, "[::1]:8080"},
		{"it starts after the claim", nil, []string{loopback}, loopback},
		{"at the pod's address", []string{pod}, []string{pod}, pod},
		{"at all addresses", []string{"[::]:8080"}, []string{"[::]:8080"}, pod},
		{"behind a proxy with the same port", []string{loopback, pod}, []string{loopback, pod}, pod},
		{"the proxy restarts", []string{loopback, pod}, []string{loopback}, ""},
		{"a proxy on all addresses restarts", []string{loopback, "0.0.0.0:8080"}, []string{loopback}, ""},
		{"the proxy is at another address of the pod", []string{loopback}, []string{loopback, "10.0.0.10:8080"}, ""},
		{"a proxy with another port", []string{loopback, "10.0.0.9:8443"}, []string{loopback, "10.0.0.9:8443"}, loopback},
		{"nothing listens", nil, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			listeners := new(podListeners)
			a := newApplication(listeners.read, slog.New(slog.DiscardHandler))
			listeners.set(tt.before...)
			if _, err := a.recordListeners(); err != nil {
				t.Fatal(err)
			}
			listeners.set(tt.now...)
			conn, err := a.dial(t.Context(), interceptor.Flow{Protocol: "tcp", Dst: netip.MustParseAddrPort(pod)}, listeners.dial)
			got := ""
			if err == nil {
				got = conn.(*dialed).to.String()
				conn.Close()
			}
			if got != tt.want || err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("dial = %q, %v; want %q", got, err, tt.want)
			}
		})
	}
}

// The proxy did not listen when the claim arrived. Only a connection showed that it listens.
func TestApplicationRemembersAConnectionToThePodsAddress(t *testing.T) {
	listeners := new(podListeners)
	a := newApplication(func() ([]netip.AddrPort, error) {
		return []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")}, nil
	}, slog.New(slog.DiscardHandler))
	f := interceptor.Flow{Protocol: "tcp", Dst: netip.MustParseAddrPort("10.0.0.9:8080")}
	listeners.set("127.0.0.1:8080", "10.0.0.9:8080")
	conn, err := a.dial(t.Context(), f, listeners.dial)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	listeners.set("127.0.0.1:8080")
	if conn, err := a.dial(t.Context(), f, listeners.dial); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial = %v, %v; want a refusal", conn, err)
	}
}

// A call within the pod, which reached it at loopback, shows nothing.
func TestCallWithinThePodExposesNothing(t *testing.T) {
	listeners := new(podListeners)
	listeners.set("127.0.0.1:8080")
	a := newApplication(listeners.read, slog.New(slog.DiscardHandler))
	for _, to := range []string{"127.0.0.1:8080", "10.0.0.9:8080"} {
		conn, err := a.dial(t.Context(), interceptor.Flow{Protocol: "tcp", Dst: netip.MustParseAddrPort(to)}, listeners.dial)
		if err != nil {
			t.Fatalf("to %s: %v", to, err)
		}
		conn.Close()
	}
}

func TestApplicationDoesNotGuessWhereItListens(t *testing.T) {
	listeners := new(podListeners)
	listeners.set("127.0.0.1:8080")
	a := newApplication(func() ([]netip.AddrPort, error) { return nil, errors.New("no /proc") }, slog.New(slog.DiscardHandler))
	f := interceptor.Flow{Protocol: "tcp", Dst: netip.MustParseAddrPort("10.0.0.9:8080")}
	if conn, err := a.dial(t.Context(), f, listeners.dial); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial = %v, %v; want a refusal", conn, err)
	}
}

func TestParseListenersIgnoresOtherStates(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the text is of a little-endian machine")
	}
	const text = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0200010A:1F92 0900010A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   3: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0 0 0 0 0 0
   4: 0000000000000000FFFF00000100007F:0051 00000000000000000000000000000000:0000 0A 0 0 0 0 0 0
   5: 0100007F:1F93 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
`
	got, err := parseListeners(strings.NewReader(text), map[string]bool{"socket:[4]": true})
	want := "[127.0.0.1:8081 0.0.0.0:8080 [::1]:80 [::ffff:127.0.0.1]:81]"
	if fmt.Sprint(got) != want || err != nil {
		t.Errorf("parseListeners = %v, %v; want %s", got, err, want)
	}
	for _, bad := range []string{"0: 1", "0: 0100007F 0 0A", "0: 01:1F90 0 0A", "0: zz:1F90 0 0A", "0: 0100007F:1F9000 0 0A"} {
		if got, err := parseListeners(io.MultiReader(strings.NewReader("headings\n"), strings.NewReader(bad)), nil); err == nil {
			t.Errorf("%q is read as %v", bad, got)
		}
	}
}
