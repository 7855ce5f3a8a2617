// Package helpertest states what a daemon relies on in its Helper, as a test. The helper in this process, the client of
// a helper process and the fakes of tests pass it.
package helpertest

import (
	"context"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// Helper is the interface Helper of internal/laptop/daemon, which internal/laptop/helper cannot import.
type Helper interface {
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error)
	MarkedSocket(ctx context.Context, network string) (*os.File, error)
	Changes() <-chan api.NetworkApplied
	Done() <-chan struct{}
	Close() error
}

// Test checks a Helper. open returns a new one, whose network has a nameserver. Test closes it.
func Test(t *testing.T, open func(t *testing.T) Helper) {
	t.Run("devices", func(t *testing.T) { testDevices(t, open(t)) })
	t.Run("states", func(t *testing.T) { testStates(t, open(t)) })
	t.Run("sockets", func(t *testing.T) { testSockets(t, open(t)) })
	t.Run("end", func(t *testing.T) { testEnd(t, open(t)) })
}

// device creates a device. The file has the name of the interface, which macOS chooses.
func device(t *testing.T, h Helper) *os.File {
	t.Helper()
	name := "kubevpn7"
	if runtime.GOOS == "darwin" {
		name = "utun"
	}
	f, err := h.CreateTUN(t.Context(), name, 1400)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if got := f.Name(); got != name && (name != "utun" || !strings.HasPrefix(got, name)) {
		t.Errorf("the name of the file is %q, want that of the interface, %s", got, name)
	}
	return f
}

func closes(t *testing.T, h Helper) {
	t.Helper()
	if err := h.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func testDevices(t *testing.T, h Helper) {
	defer closes(t, h)
	f := device(t, h)
	if err := f.Close(); err != nil {
		t.Errorf("the caller does not own the file: %v", err)
	}
}

// testStates applies states as a daemon does: with a link, the same again, and the zero state, which removes all.
func testStates(t *testing.T, h Helper) {
	defer closes(t, h)
	f := device(t, h)
	state := api.NetworkState{
		Links: []api.Link{{
			Name: f.Name(), MTU: 1400, Addrs: []netip.Prefix{netip.MustParsePrefix("198.19.0.1/32")},
			Routes:   []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("198.19.0.0/16")},
			Resolver: netip.MustParseAddr("198.19.255.53"), MatchDomains: []string{"cluster.local"},
		}},
		Resolver: &api.Resolver{Listen4: netip.MustParseAddrPort("127.0.0.1:5399")},
	}
	for range 2 {
		applied, err := h.Apply(t.Context(), state)
		if err != nil {
			t.Fatal(err)
		}
		if applied.ResolverMode == "" || len(applied.Upstreams) == 0 {
			t.Errorf("a state with a resolver: mode %q, upstreams %v", applied.ResolverMode, applied.Upstreams)
		}
	}
	for range 2 {
		applied, err := h.Apply(t.Context(), api.NetworkState{})
		if err != nil {
			t.Fatal(err)
		}
		if applied.ResolverMode != "" || len(applied.Upstreams) > 0 {
			t.Errorf("the zero state: mode %q, upstreams %v", applied.ResolverMode, applied.Upstreams)
		}
	}
}

func testSockets(t *testing.T, h Helper) {
	defer closes(t, h)
	for _, network := range []string{"udp4", "udp6", "tcp4", "tcp6"} {
		f, err := h.MarkedSocket(t.Context(), network)
		if runtime.GOOS != "linux" { // queries need no mark there
			if err == nil {
				f.Close()
				t.Errorf("%s: a system without marks returned a marked socket", network)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", network, err)
			continue
		}
		checkSocket(t, network, f)
		f.Close()
	}
	if f, err := h.MarkedSocket(t.Context(), "ip"); err == nil {
		f.Close()
		t.Error("it returned a socket of an unknown network")
	}
}

// checkSocket checks the type of an unconnected socket.
func checkSocket(t *testing.T, network string, f *os.File) {
	t.Helper()
	if strings.HasPrefix(network, "udp") {
		conn, err := net.FilePacketConn(f)
		if err != nil {
			t.Errorf("%s: the socket carries no datagrams: %v", network, err)
			return
		}
		conn.Close()
		return
	}
	conn, err := net.FileConn(f)
	if err != nil {
		t.Errorf("%s: it is no socket: %v", network, err)
		return
	}
	defer conn.Close()
	if tcp, ok := conn.(*net.TCPConn); !ok || tcp.RemoteAddr() != nil {
		t.Errorf("%s: it is a %T to %v", network, conn, conn.RemoteAddr())
	}
}

func testEnd(t *testing.T, h Helper) {
	f := device(t, h)
	select {
	case <-h.Done():
		t.Fatal("Done is closed, but the helper has not ended")
	default:
	}
	closes(t, h)
	select {
	case <-h.Done():
	default:
		t.Error("Done is open after Close")
	}
	closes(t, h)
	if f, err := h.CreateTUN(t.Context(), f.Name(), 1400); err == nil {
		f.Close()
		t.Error("it created a device after Close")
	}
	if _, err := h.Apply(t.Context(), api.NetworkState{}); err == nil {
		t.Error("it applied a state after Close")
	}
	for {
		select {
		case _, open := <-h.Changes():
			if open {
				continue
			}
			t.Error("Changes is closed")
		default:
		}
		return
	}
}
