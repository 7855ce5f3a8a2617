package connection

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

// directly is a laptop that reaches the manager's port without the API server. It may dial loopback addresses.
func directly(t *testing.T, i *issuer, p *podPort) (*Connection, *transport.Session) {
	t.Helper()
	s, laptop := proxied(t, i, p)
	s.transports.direct.refuse = func(netip.AddrPort) string { return "" }
	return s, laptop
}

// startPort returns the address of a server without TLS that does what the manager's port does.
func (p *podPort) startPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		refused := len(p.seen) < p.refuse
		if refused {
			p.seen = append(p.seen, "refused")
		}
		p.mu.Unlock()
		if refused {
			panic(http.ErrAbortHandler) // closed without an answer
		}
		p.serve(w, r)
	})}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	return l.Addr().String()
}

// names makes the manager name these addresses.
func (c *Connection) nameDirect(addrs ...string) {
	c.view.Update(func(v *view) { v.state.Direct = addrs })
}

// echoes checks that what is sent by a conn comes back.
func echoes(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	sent := strings.Repeat("0123456789abcdef", 1<<14)
	wrote := make(chan error, 1)
	go func() {
		_, err := io.WriteString(conn, sent)
		wrote <- err
	}()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != sent {
		t.Fatalf("what came back is not what was sent: %v", err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
}

// closedPort returns a loopback address that refuses connections.
func closedPort(t *testing.T) string { return testenv.ClosedPort(t, "tcp").String() }

// silentPort accepts connections and never answers.
func silentPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go io.Copy(io.Discard, conn)
		}
	}()
	return l.Addr().String()
}

func TestDirectUsesTheAddressThatAnswers(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	s, laptop := directly(t, &issuer{authority: a, lasts: time.Hour}, p)
	good := p.startPort(t)
	s.nameDirect("nonsense", closedPort(t), silentPort(t), good)
	for range 2 {
		conn, err := s.transports.dialDirect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		echoes(t, conn)
		conn.Close()
		if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.HasPrefix(err.Error(), "the direct connection to "+good+": ") {
			t.Errorf("a read after the end: %v", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.seen) != 2 || !strings.Contains(p.seen[0], " "+laptop.ID().String()+".") {
		t.Errorf("requests %q", p.seen)
	}
	if d := cmp.Diff([]string{laptop.ID().String(), laptop.ID().String()}, p.peer); d != "" {
		t.Errorf("certificates (-want +got):\n%s", d)
	}
	if got := s.reached.Load(); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("127.0.0.1")}) {
		t.Errorf("reached %v", got)
	}
}

// A listener that is not the manager of the session gets nothing that it can use, and is named.
func TestDirectRejectsOtherListeners(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	p.shows = a.newServer(t)
	s, _ := directly(t, &issuer{authority: a, lasts: time.Hour}, p)
	other := p.startPort(t)
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler()}
	go server.Serve(web)
	t.Cleanup(func() { server.Close() })
	for addr, want := range map[string]string{
		other:               "the server is not the traffic manager of this session",
		web.Addr().String(): "the answer is not from a traffic manager",
		closedPort(t):       "connection refused",
		"no-port":           "is not HOST:PORT",
	} {
		s.nameDirect(addr)
		conn, err := s.transports.dialDirect(t.Context())
		if err == nil {
			conn.Close()
		}
		e := s.cluster.Explain(err)
		if e == nil || !strings.HasPrefix(e.Message, "no direct connection: ") || !strings.Contains(e.Message, want) || strings.Contains(e.Message, "\n") {
			t.Errorf("%s: %+v, want %q", addr, e, want)
		}
	}
	s.nameDirect()
	if _, err := s.transports.dialDirect(t.Context()); err == nil || err.Error() != "the traffic manager names no address for direct connections" {
		t.Errorf("without addresses: %v", err)
	}
	p.wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.peer) != 0 {
		t.Errorf("the other server saw the certificates %q", p.peer)
	}
}

// Another pod of the manager does not know the ticket, and closes the connection without an answer.
func TestDirectForgetsRejectedTickets(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	p.refuse = 1
	i := &issuer{authority: a, lasts: time.Hour}
	s, _ := directly(t, i, p)
	s.nameDirect(p.startPort(t))
	if conn, err := s.transports.dialDirect(t.Context()); err == nil || !strings.Contains(err.Error(), errSilent.Error()) {
		t.Fatalf("got %v, %v", conn, err)
	}
	conn, err := s.transports.dialDirect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if got := i.asked.Load(); got != 2 {
		t.Errorf("asked for %d tickets, want 2", got)
	}
}

// Nothing goes through the connection's own tunnel: it would carry itself.
func TestDirectStaysOutsideOfTheTunnel(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	s, _ := directly(t, &issuer{authority: a, lasts: time.Hour}, p)
	s.nameDirect(p.startPort(t))
	inner := netip.MustParseAddr("198.18.0.5")
	s.view.Update(func(v *view) { v.lease.Addrs = []netip.Addr{inner} })
	d := s.transports.direct
	d.source = func(netip.AddrPort) (netip.Addr, error) { return inner, nil }
	if _, err := s.transports.dialDirect(t.Context()); err == nil || !strings.Contains(err.Error(), throughTunnel) {
		t.Errorf("got %v", err)
	}
	// The routes change between the check and the connection.
	s.view.Update(func(v *view) { v.lease.Addrs = addrs("127.0.0.1") })
	d.source = func(netip.AddrPort) (netip.Addr, error) { return inner, nil }
	if _, err := s.transports.dialDirect(t.Context()); err == nil || !strings.Contains(err.Error(), throughTunnel) {
		t.Errorf("got %v", err)
	}
	if got := s.reached.Load(); len(got) > 0 {
		t.Errorf("reached %v by the tunnel", got)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.seen) > 0 {
		t.Errorf("requests %q", p.seen)
	}
}

func TestSurveyFindsWhatIsReached(t *testing.T) {
	s := newTestConnection(t)
	d := s.transports.direct
	d.refuse = func(netip.AddrPort) string { return "" }
	s.nameDirect(closedPort(t), silentPort(t))
	d.survey(t.Context())
	if got := s.reached.Load(); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("127.0.0.1")}) {
		t.Errorf("reached %v", got)
	}
	select {
	case <-s.changed:
	default:
		t.Error("the routes do not know")
	}
}

func TestCandidatesAreBoundedAndChecked(t *testing.T) {
	s := newTestConnection(t)
	d := s.transports.direct
	d.source = func(netip.AddrPort) (netip.Addr, error) { return netip.MustParseAddr("192.0.2.1"), nil }
	var asked atomic.Int32
	d.lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
		asked.Add(1)
		if host != "lb.example" {
			return nil, errors.New("no such host")
		}
		var all []netip.Addr
		for n := range 100 {
			all = append(all, netip.AddrFrom4([4]byte{198, 51, 100, byte(n)}))
		}
		return append([]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::ffff:203.0.113.9")}, all...), nil
	}
	s.nameDirect("LB.example.:443", "other.example:443", "127.0.0.1:80", "10.0.0.1:10802", "[::ffff:10.0.0.1]:10802")
	to, left := d.candidates(t.Context())
	want := []string{"203.0.113.9:443", "198.51.100.0:443", "198.51.100.1:443", "10.0.0.1:10802"}
	if d := cmp.Diff(want, strings.Fields(strings.Trim(fmt.Sprint(to), "[]"))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, text := range []string{"127.0.0.1:443: it is loopback", "other.example:443: no such host", "127.0.0.1:80: it is loopback"} {
		if left == nil || !strings.Contains(left.Error(), text) {
			t.Errorf("left out: %v, want %q", left, text)
		}
	}
	asked.Store(0)
	many := make([]string, 10000)
	for i := range many {
		many[i] = "lb.example:1"
	}
	s.nameDirect(many...)
	if d.candidates(t.Context()); asked.Load() != api.MaxDirect {
		t.Errorf("looked up %d names", asked.Load())
	}
}

func TestRefuseOutside(t *testing.T) {
	for text, refused := range map[string]bool{
		"10.1.2.3:10802": false, "203.0.113.7:443": false, "[2001:db8::1]:30000": false, "[fd00::1]:1": false,
		"127.0.0.1:80": true, "127.9.9.9:80": true, "[::1]:80": true, "0.0.0.0:80": true, "[::]:80": true, "0.1.2.3:80": true,
		"169.254.169.254:80": true, "[fe80::1]:80": true, "[fe80::1%lo]:80": true, "[2001:db8::1%lo]:80": true,
		"224.0.0.1:80": true, "[ff02::1]:80": true, "255.255.255.255:80": true,
		"[::ffff:127.0.0.1]:80": true, "[::ffff:169.254.169.254]:80": true, "[64:ff9b::7f00:1]:80": true,
		"[64:ff9b::a9fe:a9fe]:80": true, "[64:ff9b::808:808]:80": false, "[::ffff:0.0.0.0]:80": true,
	} {
		_, addr, err := parseDirect(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if why := refuseOutside(addr); (why != "") != refused {
			t.Errorf("%s: %q", text, why)
		}
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range own {
		p, err := netip.ParsePrefix(o.String())
		if err != nil {
			t.Fatal(err)
		}
		if refuseOutside(netip.AddrPortFrom(p.Addr().Unmap(), 80)) == "" {
			t.Errorf("the laptop dials its own address %v", p.Addr())
		}
	}
}

func FuzzParseDirect(f *testing.F) {
	for _, text := range []string{"10.0.0.1:10802", "[fe80::1%eth0]:1", "lb.example.:443", "localhost:80", "a:b:c", ":80", "[::ffff:1.2.3.4]:65535", "1.2.3.4:0", "x.y:65536"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		host, addr, err := parseDirect(text)
		switch {
		case err != nil:
			if host != "" || addr.IsValid() {
				t.Errorf("%q: %q, %v, %v", text, host, addr, err)
			}
		case addr.Port() == 0, (host != "") == addr.Addr().IsValid(), addr.Addr().Is4In6(), len(host) > 253,
			strings.ContainsAny(host, " /\\:@\n"), host != "" && !strings.Contains(host, "."):
			t.Errorf("%q: %q, %v", text, host, addr)
		}
	})
}

func FuzzReadSwitch(f *testing.F) {
	const good = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: kubevpn\r\n\r\n"
	f.Add(good)
	f.Add("HTTP/1.1 200 OK\r\n\r\n")
	f.Add("HTTP/1.1 101 \r\nUpgrade: h2c\r\n\r\n")
	f.Add(strings.Repeat("x", maxSwitch+1))
	f.Fuzz(func(t *testing.T, text string) {
		r := strings.NewReader(text + "rest")
		if err := readSwitch(r); err == nil {
			head, _, _ := strings.Cut(text+"rest", "\r\n\r\n")
			if left := r.Len(); left != len(text)+len("rest")-len(head)-4 {
				t.Errorf("%d bytes are left of %q", left, text)
			}
		} else if read := len(text) + 4 - r.Len(); read > maxSwitch {
			t.Errorf("read %d bytes", read)
		}
	})
}

func TestKeptOutOfTheTunnel(t *testing.T) {
	addr := netip.MustParseAddr
	pods := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	named := []string{"10.244.1.9:10802", "10.0.0.5:31000", "lb.example:10802", "nonsense"}
	for _, tt := range []struct {
		name          string
		reached, want []netip.Addr
	}{
		{"nothing_reached", nil, nil},
		{"node_port", []netip.Addr{addr("10.0.0.5")}, []netip.Addr{addr("10.0.0.5")}},
		{"earlier_pod", []netip.Addr{addr("10.244.3.3")}, []netip.Addr{addr("10.244.3.3"), addr("10.244.1.9")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := keptOut(tt.reached, api.ManagerState{PodCIDRs: pods, Direct: named}); !slices.Equal(got, tt.want) {
				t.Errorf("kept out: %v, want %v", got, tt.want)
			}
		})
	}
}

func TestNewAddressesAreTriedAtOnce(t *testing.T) {
	s := newTestConnection(t)
	retries := 0
	s.handshake.retry = func() { retries++ }
	for _, tt := range []struct {
		direct []string
		want   int
	}{{nil, 0}, {[]string{"10.0.0.1:1"}, 1}, {[]string{"10.0.0.1:1"}, 1}, {[]string{"10.0.0.2:1"}, 2}, {nil, 3}} {
		s.handshake.learn(api.ManagerState{Direct: tt.direct})
		if retries != tt.want {
			t.Errorf("%q: %d retries, want %d", tt.direct, retries, tt.want)
		}
	}
}
