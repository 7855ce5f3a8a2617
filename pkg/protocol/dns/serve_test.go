package dns

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"kubevpn/internal/testenv"
)

// The resolver cuts a reply to the client's UDP size, and sends it whole over TCP.
func TestRepliesFitTheClient(t *testing.T) {
	t.Parallel()
	var zone strings.Builder
	for i := range 400 {
		fmt.Fprintf(&zone, "big.default.svc.cluster.local. 30 IN A 10.244.%d.%d\n", i/200, i%200)
	}
	for i := range 20 {
		fmt.Fprintf(&zone, "mid.default.svc.cluster.local. 30 IN A 10.244.2.%d\n", i)
	}
	w := newWorld(t)
	cluster := newFakeServer(t, "cluster.local.", zone.String())
	w.zone.Cluster = newNameservers(t, "lab", cluster.addr)
	w.zone.Services.Apply(false, map[string][]string{"default": {"big", "mid"}}, nil)
	w.setZones(t, w.zone)
	for _, test := range []struct {
		name      string
		network   string
		size      uint16 // 0: no OPT record
		truncated bool
		max       int
	}{
		{"big", "udp", 0, true, 512},
		{"big", "udp", 100, true, 512},
		{"big", "udp", 512, true, 512},
		{"big", "udp", 1232, true, 1232},
		{"big", "udp", 4096, true, 4096},
		{"big", "udp", 65535, true, 4096},
		{"big", "tcp", 0, false, 65535},
		{"big", "tcp", 512, false, 65535},
		{"mid", "udp", 0, false, 512},
		{"mid", "udp", 1232, false, 1232},
	} {
		q := newQuery(test.name, dns.TypeA)
		if test.size > 0 {
			q.SetEdns0(test.size, true)
		}
		got := query(t, test.network, w.addr, q)
		if got.Truncated != test.truncated || got.Rcode != dns.RcodeSuccess {
			t.Errorf("%+v: TC is %v, %s", test, got.Truncated, dns.RcodeToString[got.Rcode])
		}
		got.Compress = true
		if packed, err := got.Pack(); err != nil || len(packed) > test.max {
			t.Errorf("%+v: %d bytes, %v", test, len(packed), err)
		}
		if opt := got.IsEdns0(); (opt != nil) != (test.size > 0) || opt != nil && !opt.Do() {
			t.Errorf("%+v: OPT is %v", test, opt)
		}
	}
	for _, asked := range w.upstream.got() {
		t.Errorf("the upstream was asked %s", asked)
	}
}

func TestMalformedQueriesAreRejected(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	name := "\x03web\x00\x00\x01\x00\x01"
	for _, test := range []struct {
		name  string
		query string
		want  string // "" : no reply
	}{
		{"empty", "", ""},
		{"short", "\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00", ""},
		{"response", "\x00\x01\x81\x00\x00\x01\x00\x00\x00\x00\x00\x00" + name, ""},
		{"notify", "\x00\x02\x21\x00\x00\x01\x00\x00\x00\x00\x00\x00" + name, "\x00\x02\xa1\x84\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"update", "\x00\x02\x28\x00\x00\x01\x00\x00\x00\x00\x00\x00" + name, "\x00\x02\xa8\x84\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"no_question", "\x00\x03\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00", "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"two_questions", "\x00\x03\x01\x00\x00\x02\x00\x00\x00\x00\x00\x00" + name + name, "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"cut_name", "\x00\x03\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03we", "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"cut_type", "\x00\x03\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03web\x00\x00\x01", "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"pointer", "\x00\x03\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01", "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"long_label", "\x00\x03\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x40" + strings.Repeat("a", 64) + "\x00\x00\x01\x00\x01", "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"long_name", "\x00\x03\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + strings.Repeat("\x3f"+strings.Repeat("a", 63), 4) + "\x00\x00\x01\x00\x01", "\x00\x03\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"cluster_name_with_broken_rest", "\x00\x03\x01\x10\x00\x01\x00\x00\x00\x00\x00\x01" + name + "\x00\x00\x29\x10", "\x00\x03\x81\x91\x00\x01\x00\x00\x00\x00\x00\x00" + name},
		{"ednsversion", "\x00\x04\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01" + name + "\x00\x00\x29\x04\xd0\x00\x01\x00\x00\x00\x00",
			"\x00\x04\x81\x00\x00\x01\x00\x00\x00\x00\x00\x01" + name + "\x00\x00\x29\x10\x00\x01\x00\x00\x00\x00\x00"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.want != "" {
				if diff := cmp.Diff([]byte(test.want), rawQuery(t, w.addr, []byte(test.query))); diff != "" {
					t.Errorf("reply (-want +got):\n%s", diff)
				}
				return
			}
			if got := w.resolver.handle(t.Context(), "udp", []byte(test.query), nil); got != nil {
				t.Errorf("got %q", got)
			}
		})
	}
	if a, b := w.upstream.got(), w.cluster.got(); a != nil || b != nil {
		t.Errorf("the upstream was asked %q, the cluster %q", a, b)
	}
	if got := text(query(t, "udp", w.addr, newQuery("printer", dns.TypeA))); got != "NOERROR printer. A 192.0.2.4" {
		t.Errorf("after the malformed queries: %s", got)
	}
}

// The names have 255 bytes, and labels of 63.
func TestLongestNamesAreResolved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	label := strings.Repeat("a", 63)
	outside := strings.Join([]string{label, label, label, strings.Repeat("b", 61)}, ".")
	inside := strings.Join([]string{label, label, label, strings.Repeat("b", 47)}, ".") + ".cluster.local"
	if got := text(query(t, "udp", w.addr, newQuery(outside, dns.TypeA))); got != "NXDOMAIN" {
		t.Errorf("got %s", got)
	}
	if got := text(query(t, "udp", w.addr, newQuery(inside, dns.TypeA))); got != "NXDOMAIN" {
		t.Errorf("got %s", got)
	}
	// With the cluster domain appended, the name would be too long. It cannot exist, and still does not go upstream.
	tooLong := strings.Join([]string{label, label, label, strings.Repeat("b", 50)}, ".") + ".x.svc"
	if got := text(query(t, "udp", w.addr, newQuery(tooLong, dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("got %s", got)
	}
	if diff := cmp.Diff([]string{"udp " + outside + ". A"}, w.upstream.got()); diff != "" {
		t.Errorf("the upstream was asked (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"udp " + inside + ". A"}, w.cluster.got()); diff != "" {
		t.Errorf("the cluster was asked (-want +got):\n%s", diff)
	}
}

// The client sends several queries on one TCP connection and closes its sending half. A slow answer does not delay the
// others.
func TestPipelinedQueriesAreAnswered(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	release := make(chan struct{})
	w.cluster.setAnswer(func(_ dns.ResponseWriter, q *dns.Msg) bool {
		if q.Question[0].Name == "db.default.svc.cluster.local." {
			<-release
		}
		return false
	})
	c, err := net.Dial("tcp4", w.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	var sent bytes.Buffer
	for i, name := range []string{"db", "web", "printer", "web.default.svc.cluster.local"} {
		q := newQuery(name, dns.TypeA)
		q.Id = uint16(i)
		packed, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		if err := writeTCP(&sent, packed); err != nil {
			t.Fatal(err)
		}
	}
	for _, piece := range [][]byte{sent.Bytes()[:1], sent.Bytes()[1:7], sent.Bytes()[7:]} { // in pieces
		if _, err := c.Write(piece); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got := map[uint16]bool{}
	for range 3 {
		m, err := readTCP(c)
		if err != nil {
			t.Fatal(err)
		}
		got[binary.BigEndian.Uint16(m)] = true
	}
	if got[0] {
		t.Error("the slow answer came before the others")
	}
	close(release)
	if m, err := readTCP(c); err != nil || binary.BigEndian.Uint16(m) != 0 {
		t.Errorf("got %q, %v", m, err)
	}
	if _, err := readTCP(c); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

// The limit of queries to the upstream does not affect queries to clusters.
func TestQueriesBeyondLimitFailAtOnce(t *testing.T) {
	t.Parallel()
	cluster := newFakeServer(t, "cluster.local.", clusterZone)
	release := make(chan struct{})
	var once sync.Once
	defer once.Do(func() { close(release) })
	upstream := newFakeServer(t, ".", outsideZone)
	upstream.setAnswer(func(dns.ResponseWriter, *dns.Msg) bool { <-release; return false })
	r := New(Config{Upstreams: []netip.AddrPort{upstream.addr}, Logger: quiet()})
	r.inFlight = 8
	t.Cleanup(func() { r.SetUpstreams(nil) })
	if err := r.SetZones([]Zone{{Domain: "cluster.local", Services: clusterServices(), Cluster: newNameservers(t, "lab", cluster.addr)}}); err != nil {
		t.Fatal(err)
	}
	addr := serve(t, r)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if got := text(query(t, "udp", addr, newQuery("printer", dns.TypeA))); got != "NOERROR printer. A 192.0.2.4" {
				t.Errorf("got %s", got)
			}
		})
	}
	testenv.Until(t, "eight queries are in flight", func() bool { return r.upstreamInFlight.Load() == 8 })
	if got := text(query(t, "udp", addr, newQuery("printer", dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("got %s", got)
	}
	want := "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10"
	if got := text(query(t, "udp", addr, newQuery("web", dns.TypeA))); got != want {
		t.Errorf("got %s", got)
	}
	once.Do(func() { close(release) })
	wg.Wait()
	if n := r.upstreamInFlight.Load() + r.clusterInFlight.Load(); n != 0 {
		t.Errorf("%d queries are still in flight", n)
	}
}

// Queries are in flight and connections open when the context ends.
func TestServeEndsWithItsContext(t *testing.T) {
	t.Parallel()
	begun := make(chan struct{}, 2)
	silent := rawUDP(t, func([]byte) [][]byte { begun <- struct{}{}; return nil })
	r := New(Config{Upstreams: []netip.AddrPort{silent}, Logger: quiet()})
	t.Cleanup(func() { r.SetUpstreams(nil) })
	pc, l := listenBoth(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(ctx, []net.PacketConn{pc}, []net.Listener{l}) }()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	u, err := net.Dial("udp4", pc.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	q, err := newQuery("www.example.com", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := u.Write(q); err != nil {
		t.Fatal(err)
	}
	<-begun
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("Serve: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Serve goes on")
	}
	if _, err := pc.WriteTo(nil, u.LocalAddr()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the UDP socket is open: %v", err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is open: %v", err)
	}
}

// Serve returns the error of a broken listener, and closes the others.
func TestServeEndsWithAListener(t *testing.T) {
	t.Parallel()
	r := New(Config{Logger: quiet()})
	pc, l := listenBoth(t)
	l.Close()
	err := r.Serve(context.Background(), []net.PacketConn{pc}, []net.Listener{l})
	if !errors.Is(err, net.ErrClosed) || !strings.HasPrefix(err.Error(), "accepting connections on 127.0.0.1:") {
		t.Errorf("got %v", err)
	}
	if _, err := pc.WriteTo([]byte{0}, pc.LocalAddr()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the UDP socket is open: %v", err)
	}
}

// pipeConn is a net.PacketConn that is not a kernel socket, like those of a netstack.
type pipeConn struct {
	net.PacketConn
}

func TestServeAcceptsAnyPacketConn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pc, l := listenBoth(t)
	l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.resolver.Serve(ctx, []net.PacketConn{pipeConn{pc}}, nil) }()
	addr := pc.LocalAddr().(*net.UDPAddr).AddrPort()
	if got := text(query(t, "udp", addr, newQuery("printer", dns.TypeA))); got != "NOERROR printer. A 192.0.2.4" {
		t.Errorf("got %s", got)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

func TestServeDNSResolvesNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, want := range map[string]string{
		"web":            "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
		"www.google.com": "NOERROR www.google.com. A 192.0.2.2",
	} {
		m, err := w.resolver.ServeDNS(t.Context(), newQuery(name, dns.TypeA))
		if err != nil || text(m) != want {
			t.Errorf("got %v, %v", m, err)
		}
	}
	w.zone.Cluster = handlerFunc(brokenTunnel)
	w.setZones(t, w.zone)
	if _, err := w.resolver.ServeDNS(t.Context(), newQuery("web", dns.TypeA)); !errors.Is(err, errTunnelDown) {
		t.Errorf("got %v", err)
	}
	if _, err := w.resolver.ServeDNS(t.Context(), new(dns.Msg)); err == nil {
		t.Error("a message without a question was answered")
	}
}
