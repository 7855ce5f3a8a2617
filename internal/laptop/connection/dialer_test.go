package connection

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// Dial bypasses the device: it asks the manager for the address, as a flow would, and returns the manager's reason.
func TestDialReportsTheManagersError(t *testing.T) {
	s := newTestConnection(t)
	open := netip.MustParseAddrPort("10.244.1.5:8080")
	if _, err := s.Dial(t.Context(), "tcp", open); !errors.Is(err, errTunnelDown) {
		t.Errorf("without a session: %v", err)
	}
	laptop, manager := transporttest.Pair(t)
	s.current.set(laptop)
	go func() {
		for {
			in, err := manager.Accept(context.Background())
			switch {
			case err != nil:
				return
			case in.Dst != open:
				in.Reject(transport.CodeRefused)
			case in.Datagrams():
				if p, err := in.AcceptPackets(); err == nil {
					b := make([]byte, 100)
					n, _ := p.ReadPacket(b)
					p.WritePacket(b[:n])
					p.Close()
				}
			default:
				if st, err := in.Accept(); err == nil {
					io.Copy(st, st)
					st.Close()
				}
			}
		}
	}()
	for _, network := range []string{"tcp", "udp"} {
		conn, err := s.Dial(t.Context(), network, open)
		if err != nil {
			t.Fatal(network, err)
		}
		if _, ok := conn.(net.PacketConn); ok != (network == "udp") { // net.Resolver asks
			t.Errorf("%s: a conn of packets: %v", network, ok)
		}
		b := make([]byte, 100)
		if _, err := io.WriteString(conn, "ping"); err != nil {
			t.Error(network, err)
		}
		if n, err := conn.Read(b); string(b[:n]) != "ping" {
			t.Errorf("%s: %q, %v", network, b[:n], err)
		}
		conn.Close()
	}
	if _, err := s.Dial(t.Context(), "tcp", netip.MustParseAddrPort("10.244.1.5:1")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a closed port: %v", err)
	}
	s.status.change(func(r *report) { r.shown.Status = api.StatusReconnecting })
	if _, err := s.Dial(t.Context(), "tcp", open); !errors.Is(err, errTunnelDown) {
		t.Errorf("while the tunnel is mended: %v", err)
	}
}

func TestFlowOpensInTheNextSession(t *testing.T) {
	s := newTestConnection(t)
	first, _ := transporttest.Pair(t) // whose manager does not answer
	second, manager := transporttest.Pair(t)
	s.current.set(first)
	opened := make(chan error, 1)
	go func() {
		stream, err := dialer{s.current, nil, s.flows, s.shortcuts}.DialTCP(t.Context(), netip.MustParseAddrPort("198.19.0.2:40000"),
			netip.MustParseAddrPort("10.96.0.10:80"))
		if err == nil {
			err = stream.Close()
		}
		opened <- err
	}()
	first.Close()
	s.current.set(second)
	in, err := manager.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stream, err := in.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}
