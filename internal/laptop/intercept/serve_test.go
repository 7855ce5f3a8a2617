package intercept

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

var (
	podClient = netip.MustParseAddrPort("10.244.1.9:40000")
	podIP     = netip.MustParseAddr("10.244.0.1")
)

// serving runs a server on one end of a session, and returns the agent's end.
func serving(t *testing.T, ports ...api.PortMap) *transport.Session {
	t.Helper()
	laptop, agent := transporttest.Pair(t)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { newServer(ports, new(net.Dialer).DialContext, quiet()).accept(ctx, laptop) })
	t.Cleanup(func() {
		laptop.Close()
		cancel()
		wg.Wait()
	})
	return agent
}

func open(t *testing.T, agent *transport.Session, port uint16) (*transport.Stream, error) {
	t.Helper()
	return agent.Open(t.Context(), transport.Request{Proto: transport.ProtoTCP, Src: podClient, Dst: netip.AddrPortFrom(podIP, port)})
}

// program listens on a free port, which it returns, and calls serve for each connection.
func program(t *testing.T, network, address string, serve func(*net.TCPConn)) uint16 {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Skip("this machine has no such address: ", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				serve(conn.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

func TestHalfCloseReachesTheProgram(t *testing.T) {
	for _, tt := range []struct{ name, network, address string }{{"ipv4", "tcp4", "127.0.0.1:0"}, {"ipv6", "tcp6", "[::1]:0"}} {
		t.Run(tt.name, func(t *testing.T) {
			local := program(t, tt.network, tt.address, func(c *net.TCPConn) {
				all, err := io.ReadAll(c)
				fmt.Fprintf(c, "%d bytes, %v", len(all), err)
			})
			agent := serving(t, api.PortMap{Protocol: "tcp", Container: 8080, Local: local})
			s, err := open(t, agent, 8080)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(s, strings.Repeat("x", 1<<20)); err != nil {
				t.Error(err)
			}
			if err := s.CloseWrite(); err != nil {
				t.Error(err)
			}
			if all, err := io.ReadAll(s); string(all) != "1048576 bytes, <nil>" || err != nil {
				t.Errorf("%q, %v", all, err)
			}
			s.Close()
		})
	}
}

func TestStreamIsRejected(t *testing.T) {
	agent := serving(t, api.PortMap{Protocol: "tcp", Container: 8080, Local: testenv.ClosedPort(t, "tcp").Port()})
	if _, err := open(t, agent, 8080); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := open(t, agent, 22); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a port that is not intercepted: %v", err)
	}
	if _, err := agent.Open(t.Context(), transport.Request{Proto: transport.ProtoControl}); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a request that is not a flow: %v", err)
	}
}

// The program need not read.
func TestResetReachesTheOtherEnd(t *testing.T) {
	var reset sync.WaitGroup
	local := program(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := c.Read(b); err != nil {
			t.Error(err)
		}
		switch b[0] {
		case 'r':
			c.SetLinger(0)
		case 'w':
			defer reset.Done()
			err := testenv.Poll(10*time.Second, func() error { // only writes
				if _, err := c.Write(make([]byte, 1000)); err == nil {
					return errors.New("not yet")
				}
				return nil
			})
			if err != nil {
				t.Error("the reset did not reach the program")
			}
		}
	})
	agent := serving(t, api.PortMap{Protocol: "tcp", Container: 8080, Local: local})

	s, err := open(t, agent, 8080)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(s, "r")
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the program's reset: %v", err)
	}

	if s, err = open(t, agent, 8080); err != nil {
		t.Fatal(err)
	}
	reset.Add(1)
	io.WriteString(s, "w")
	blocked := make(chan struct{})
	go func() { // until all buffers are full
		defer close(blocked)
		for b := make([]byte, 1<<20); ; {
			s.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
			if _, err := s.Write(b); err != nil {
				return
			}
		}
	}()
	<-blocked
	s.Reset()
	reset.Wait()
}

func TestEndOfSessionResetsTheProgram(t *testing.T) {
	ended := make(chan error, 1)
	local := program(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		_, err := io.ReadAll(c)
		ended <- err
	})
	agent := serving(t, api.PortMap{Protocol: "tcp", Container: 8080, Local: local})
	if _, err := open(t, agent, 8080); err != nil {
		t.Fatal(err)
	}
	agent.Close()
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the program read %v", err)
	}
}

// Also empty ones, at each loopback address.
func TestDatagramsKeepTheirSizes(t *testing.T) {
	for _, tt := range []struct{ name, network, address, host string }{
		{"ipv4", "udp4", "127.0.0.1:0", ""}, {"ipv6", "udp6", "[::1]:0", ""}, {"other host", "udp4", "127.0.0.5:0", "127.0.0.5"}} {
		t.Run(tt.name, func(t *testing.T) {
			l, err := net.ListenPacket(tt.network, tt.address)
			if err != nil {
				t.Skip("this machine has no such address: ", err)
			}
			var wg sync.WaitGroup
			defer wg.Wait()
			defer l.Close()
			wg.Go(func() {
				b := make([]byte, transport.MaxPacket)
				for {
					n, from, err := l.ReadFrom(b)
					if err != nil {
						return
					}
					l.WriteTo(b[:n], from)
				}
			})
			agent := serving(t, api.PortMap{Protocol: "udp", Container: 53, Host: tt.host, Local: uint16(l.LocalAddr().(*net.UDPAddr).Port)})
			p, err := agent.OpenPackets(t.Context(), transport.Request{Proto: transport.ProtoUDP, Src: podClient, Dst: netip.AddrPortFrom(podIP, 53)})
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, transport.MaxPacket)
			for _, size := range []int{3, 0, 1400, 30000, 1} {
				if err := p.WritePacket(b[:size]); err != nil {
					t.Fatal(err)
				}
				if n, err := p.ReadPacket(b); n != size || err != nil {
					t.Errorf("sent %d, got %d, %v", size, n, err)
				}
			}
			p.Close()
		})
	}
}

func TestDatagramToClosedPortIsRefused(t *testing.T) {
	agent := serving(t, api.PortMap{Protocol: "udp", Container: 53, Local: testenv.ClosedPort(t, "udp").Port()})
	p, err := agent.OpenPackets(t.Context(), transport.Request{Proto: transport.ProtoUDP, Src: podClient, Dst: netip.AddrPortFrom(podIP, 53)})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.WritePacket([]byte("?")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.ReadPacket(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
}

func TestRequestsGoToTheHostThatTheUserNamed(t *testing.T) {
	for _, host := range []string{"127.0.0.5", "localhost"} { // a container of this machine has an address of its own
		local := program(t, "tcp4", net.JoinHostPort(strings.Replace(host, "localhost", "127.0.0.1", 1), "0"), func(c *net.TCPConn) {
			fmt.Fprint(c, c.LocalAddr().(*net.TCPAddr).IP)
			c.Close()
		})
		agent := serving(t, api.PortMap{Protocol: "tcp", Container: 8080, Local: local, Host: host})
		stream, err := open(t, agent, 8080)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(stream); err != nil || host != "localhost" && string(got) != host {
			t.Errorf("%s: got %q, %v", host, got, err)
		}
	}
}

// The request would come back to the agent, which would send it here again.
func TestRequestsDoNotGoThroughTheConnection(t *testing.T) {
	i := &Intercept{cfg: Config{Session: routed{}, Progress: func(api.Event) {}}, log: quiet()}
	closed := testenv.ClosedPort(t, "tcp").Port()
	for _, tt := range []struct{ protocol, host, message, warning string }{
		{"tcp", "127.0.0.9", "", "no program answers at 127.0.0.9"},
		{"tcp", "127.0.1.9", "", "no program answers at 127.0.1.9"},
		{"udp", "127.0.1.9", "", ""},
		{"tcp", "192.0.2.9", "requests cannot go to 192.0.2.9:.*leads into the cluster", ""},
		{"udp", "192.0.2.9", "requests cannot go to 192.0.2.9:.*leads into the cluster", ""},
		{"tcp", "no-such-host.invalid", "requests cannot go to no-such-host.invalid", ""},
	} {
		i.status.Warnings = nil
		err := i.checkPlaces(t.Context(), []api.PortMap{{Protocol: tt.protocol, Container: 80, Local: closed, Host: tt.host}})
		if message := fmt.Sprint(err); (err != nil) != (tt.message != "") || !regexp.MustCompile(tt.message).MatchString(message) {
			t.Errorf("%s %s: %v", tt.protocol, tt.host, err)
		}
		if got := strings.Join(i.status.Warnings, "\n"); (got == "") != (tt.warning == "") || !strings.Contains(got, tt.warning) {
			t.Errorf("%s %s: warnings %q", tt.protocol, tt.host, got)
		}
	}
}

// routed is a connection that routes a network.
type routed struct{ Session }

func (routed) Status() api.Connection {
	return api.Connection{CIDRs: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
}
