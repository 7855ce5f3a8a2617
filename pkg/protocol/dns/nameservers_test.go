package dns

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"kubevpn/internal/testenv"
)

// rawUDP starts a UDP server that passes each datagram to answer, and sends the datagrams that it returns.
func rawUDP(t testing.TB, answer func(q []byte) [][]byte) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := pc.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			for _, reply := range answer(bytes.Clone(buf[:n])) {
				if _, err := pc.WriteToUDPAddrPort(reply, from); err != nil {
					return
				}
			}
		}
	})
	t.Cleanup(func() { pc.Close(); wg.Wait() })
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// newResolver serves a resolver that waits at most a second for each upstream.
func newResolver(t testing.TB, upstreams ...netip.AddrPort) (*Resolver, netip.AddrPort) {
	return newResolverWith(t, Config{Upstreams: upstreams, Logger: quiet()}, time.Second)
}

// newResolverWith serves a resolver that waits at most timeout for each upstream.
func newResolverWith(t testing.TB, cfg Config, timeout time.Duration) (*Resolver, netip.AddrPort) {
	r := New(cfg)
	r.upstream.timeout = timeout
	t.Cleanup(func() { r.SetUpstreams(nil) })
	return r, serve(t, r)
}

// rawQuery sends bytes and returns the bytes of the reply.
func rawQuery(t testing.TB, addr netip.AddrPort, q []byte) []byte {
	t.Helper()
	c, err := net.Dial("udp4", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(q); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 65536)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

// The query and the reply have parts that no DNS library writes in this way. The resolver changes only the ID.
func TestForwardedBytesStayUnchanged(t *testing.T) {
	t.Parallel()
	seen := make(chan []byte, 1)
	reply := []byte("\x12\x34\x85\xb3\x00\x01\x00\x00\x00\x00\x00\x01\x03wWw\x07eXample\x03com\x00\x00\x01\x00\x01" +
		"\x00\xff\x99\x12\x34\x00\x00\x00\x00\x00\x03abc" + "trailing garbage")
	upstream := rawUDP(t, func(q []byte) [][]byte {
		seen <- q
		r := bytes.Clone(reply)
		copy(r, q[:2])
		return [][]byte{r}
	})
	_, addr := newResolver(t, upstream)
	q := []byte("\x12\x34\x01\x70\x00\x01\x00\x00\x00\x00\x00\x01\x03wWw\x07eXample\x03com\x00\x00\x01\x00\x01" +
		"\x00\x00\x29\x10\x00\x00\x00\x80\x00\x00\x0c\x00\x0a\x00\x08cookie!!" + "more garbage")
	if got := rawQuery(t, addr, q); !bytes.Equal(got, reply) {
		t.Errorf("the reply arrived as\n%q, want\n%q", got, reply)
	}
	if got := <-seen; !bytes.Equal(got[2:], q[2:]) {
		t.Errorf("the query arrived as\n%q, want\n%q", got, q)
	}
}

func TestNextNameserverIsAskedAfterFailure(t *testing.T) {
	t.Parallel()
	good := newFakeServer(t, ".", outsideZone)
	var silentAsked atomic.Int32
	silent := rawUDP(t, func([]byte) [][]byte { silentAsked.Add(1); return nil })
	closed := netip.MustParseAddrPort("127.0.0.1:1")
	refusing := newFakeServer(t, ".", "")
	refusing.setAnswer(func(w dns.ResponseWriter, q *dns.Msg) bool {
		return w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeRefused)) == nil
	})
	failing := newFakeServer(t, ".", "")
	failing.setAnswer(func(w dns.ResponseWriter, q *dns.Msg) bool {
		return w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeServerFailure)) == nil
	})
	absent := newFakeServer(t, ".", "")
	for _, test := range []struct {
		name      string
		upstreams []netip.AddrPort
		want      string
		timeout   time.Duration // of one upstream; a minute is longer than the query may take
	}{
		{"silent", []netip.AddrPort{silent, good.addr}, "NOERROR printer. A 192.0.2.4", time.Second},
		{"closed", []netip.AddrPort{closed, good.addr}, "NOERROR printer. A 192.0.2.4", time.Minute},
		{"refusing", []netip.AddrPort{refusing.addr, failing.addr, good.addr}, "NOERROR printer. A 192.0.2.4", time.Minute},
		{"nxdomain_is_an_answer", []netip.AddrPort{absent.addr, good.addr}, "NXDOMAIN", time.Minute},
		{"all_refuse", []netip.AddrPort{refusing.addr, failing.addr}, "REFUSED", time.Minute},
		{"refused_then_silent", []netip.AddrPort{refusing.addr, silent}, "REFUSED", time.Second},
		{"all_closed", []netip.AddrPort{closed}, "SERVFAIL", time.Minute},
		{"all_silent", []netip.AddrPort{silent}, "SERVFAIL", time.Second},
		{"none", nil, "SERVFAIL", time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, addr := newResolverWith(t, Config{Upstreams: test.upstreams, Logger: quiet()}, test.timeout)
			if got := text(query(t, "udp", addr, newQuery("printer", dns.TypeA))); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
	t.Run("remembers", func(t *testing.T) {
		_, addr := newResolver(t, silent, good.addr)
		before := silentAsked.Load()
		for range 5 {
			query(t, "udp", addr, newQuery("printer", dns.TypeA))
		}
		if asked := silentAsked.Load() - before; asked != 1 {
			t.Errorf("the silent server was asked %d times", asked)
		}
	})
	t.Run("lost_datagram", func(t *testing.T) {
		var asked atomic.Int32
		lossy := rawUDP(t, func(q []byte) [][]byte {
			if asked.Add(1) == 1 {
				return nil
			}
			return [][]byte{replyTo(q, len(q), dns.RcodeSuccess)}
		})
		_, addr := newResolver(t, lossy)
		if got := text(query(t, "udp", addr, newQuery("printer", dns.TypeA))); got != "NOERROR" {
			t.Errorf("got %s", got)
		}
	})
}

// The true reply comes after many false ones.
func TestForgedRepliesAreIgnored(t *testing.T) {
	t.Parallel()
	forge := func(q []byte, change func(m *dns.Msg)) []byte {
		m := new(dns.Msg)
		if err := m.Unpack(q); err != nil {
			panic(err)
		}
		m.SetReply(m.Copy())
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: m.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(203, 0, 113, 66)}}
		change(m)
		out, err := m.Pack()
		if err != nil {
			panic(err)
		}
		return out
	}
	upstream := rawUDP(t, func(q []byte) [][]byte {
		return [][]byte{
			{}, {1}, q, // the query itself
			forge(q, func(m *dns.Msg) { m.Id++ }),
			forge(q, func(m *dns.Msg) { m.Question[0].Name = "other.example." }),
			forge(q, func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA }),
			forge(q, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }),
			forge(q, func(m *dns.Msg) { m.Question = nil }),
			forge(q, func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }),
			forge(q, func(m *dns.Msg) { m.Response = false }),
			forge(q, func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }),
			forge(q, func(m *dns.Msg) { m.Answer[0].(*dns.A).A = net.IPv4(192, 0, 2, 1) }),
		}
	})
	_, addr := newResolver(t, upstream)
	for range 3 {
		if got := text(query(t, "udp", addr, newQuery("bank.example", dns.TypeA))); got != "NOERROR bank.example. A 192.0.2.1" {
			t.Fatalf("got %s", got)
		}
	}
}

// Another server sends a reply with the right ID and question from another address than the upstream's.
func TestRepliesFromOtherSourcesAreIgnored(t *testing.T) {
	t.Parallel()
	liar, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer liar.Close()
	var from atomic.Pointer[netip.AddrPort]
	upstream := rawUDP(t, func(q []byte) [][]byte {
		lie := replyTo(q, len(q), dns.RcodeNameError)
		if _, err := liar.WriteToUDPAddrPort(lie, *from.Load()); err != nil {
			t.Error(err)
		}
		return [][]byte{replyTo(q, len(q), dns.RcodeSuccess)}
	})
	r := New(Config{Upstreams: []netip.AddrPort{upstream}, Logger: quiet(),
		Dial: func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
			c, err := dialDirectly(ctx, network, addr)
			if err == nil {
				local := c.LocalAddr().(*net.UDPAddr).AddrPort()
				from.Store(&local)
			}
			return c, err
		}})
	t.Cleanup(func() { r.SetUpstreams(nil) })
	for range 5 {
		m, err := r.ServeDNS(context.Background(), newQuery("bank.example", dns.TypeA))
		if err != nil || m.Rcode != dns.RcodeSuccess {
			t.Fatalf("got %v, %v", m, err)
		}
	}
}

// stuckConn is a conn whose Write blocks until its deadline, like a write into a full buffer.
type stuckConn struct {
	net.Conn
	deadline time.Time
}

func (c *stuckConn) SetWriteDeadline(t time.Time) error {
	c.deadline = t
	return nil
}

func (c *stuckConn) Write([]byte) (int, error) {
	if c.deadline.IsZero() {
		return 0, errors.New("Write without a deadline would block forever")
	}
	time.Sleep(time.Until(c.deadline))
	return 0, os.ErrDeadlineExceeded
}

func (c *stuckConn) Close() error { return nil }

func TestQueryThatCannotBeSentFailsInTime(t *testing.T) {
	for _, network := range []string{"udp", "tcp"} {
		synctest.Test(t, func(t *testing.T) {
			n := NewNameservers(NameserversConfig{
				Addrs: []netip.AddrPort{netip.MustParseAddrPort("10.96.0.10:53")}, Logger: quiet(),
				Dial: func(context.Context, string, netip.AddrPort) (net.Conn, error) { return new(stuckConn), nil },
			})
			q, err := new(dns.Msg).SetQuestion("web.default.svc.cluster.local.", dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			_, err = n.exchange(t.Context(), request{network: network, query: q, end: len(q)})
			if took := time.Since(begin); !errors.Is(err, errSilent) || took != rounds*serverTimeout {
				t.Errorf("%s: got %v after %v, want %v after %v", network, err, took, errSilent, rounds*serverTimeout)
			}
		})
	}
}

func TestIDsVary(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	ids := map[uint16]int{}
	upstream := rawUDP(t, func(q []byte) [][]byte {
		mu.Lock()
		defer mu.Unlock()
		ids[binary.BigEndian.Uint16(q)]++
		return [][]byte{replyTo(q, len(q), dns.RcodeSuccess)}
	})
	_, addr := newResolver(t, upstream)
	for range 100 {
		q := newQuery("a.example", dns.TypeA)
		q.Id = 7
		if got := query(t, "udp", addr, q); got.Id != 7 {
			t.Fatalf("the reply's ID is %d", got.Id)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(ids) < 95 {
		t.Errorf("100 queries had %d IDs", len(ids))
	}
}

// The resolver also replaces broken sockets.
func TestSocketsAreReused(t *testing.T) {
	t.Parallel()
	upstream := newFakeServer(t, ".", outsideZone)
	var mu sync.Mutex
	var conns []net.Conn
	n := NewNameservers(NameserversConfig{Name: "upstream", Addrs: []netip.AddrPort{upstream.addr}, Logger: quiet(),
		Dial: func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
			c, err := dialDirectly(ctx, network, addr)
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, c)
			return c, err
		}})
	defer n.Close()
	ask := func() {
		t.Helper()
		if m, err := n.ServeDNS(context.Background(), newQuery("printer", dns.TypeA)); err != nil || text(m) != "NOERROR printer. A 192.0.2.4" {
			t.Fatalf("got %v, %v", m, err)
		}
	}
	for range 10 {
		ask()
	}
	if len(conns) != 1 {
		t.Errorf("10 queries took %d sockets", len(conns))
	}
	conns[0].Close() // its tunnel has ended
	ask()
	if len(conns) != 2 {
		t.Errorf("after the socket died there were %d", len(conns))
	}
	for range 2 * poolUses {
		ask()
	}
	if len(conns) < 3 {
		t.Error("a socket is used for ever")
	}
	n.Close()
	if _, err := n.ServeDNS(context.Background(), newQuery("printer", dns.TypeA)); !errors.Is(err, errNoNameserver) {
		t.Errorf("after Close: %v", err)
	}
	for i, c := range conns {
		if _, err := c.Write([]byte{0}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("socket %d is open: %v", i, err)
		}
	}
}

// With TC set, the client retries over TCP, and the resolver then asks the upstream over TCP.
func TestTruncationReachesTheClient(t *testing.T) {
	t.Parallel()
	var zone strings.Builder
	for range 100 {
		zone.WriteString("big.example. 30 IN TXT \"" + strings.Repeat("x", 50) + "\"\n")
	}
	upstream := newFakeServer(t, ".", zone.String())
	_, addr := newResolver(t, upstream.addr)
	if got := query(t, "udp", addr, newQuery("big.example", dns.TypeTXT)); !got.Truncated {
		t.Errorf("got %s", text(got))
	}
	if got := query(t, "tcp", addr, newQuery("big.example", dns.TypeTXT)); got.Truncated || len(got.Answer) != 100 {
		t.Errorf("got %d records", len(got.Answer))
	}
	if diff := cmp.Diff([]string{"tcp big.example. TXT", "udp big.example. TXT"}, upstream.got()); diff != "" {
		t.Errorf("the upstream was asked (-want +got):\n%s", diff)
	}
	// A client that accepts a large UDP reply gets all of it.
	q := newQuery("big.example", dns.TypeTXT)
	q.SetEdns0(16384, false)
	if got := query(t, "udp", addr, q); got.Truncated || len(got.Answer) != 100 {
		t.Errorf("got %d records, TC %v", len(got.Answer), got.Truncated)
	}
}

// The upstream sends more than the client accepts and the resolver reads: the client must not get a part of it.
func TestOversizedReplyIsTruncated(t *testing.T) {
	t.Parallel()
	upstream := rawUDP(t, func(q []byte) [][]byte {
		r := replyTo(q, len(q), dns.RcodeSuccess)
		return [][]byte{append(r, make([]byte, 8000)...)}
	})
	_, addr := newResolver(t, upstream)
	got := query(t, "udp", addr, newQuery("big.example", dns.TypeTXT))
	if text(got) != "NOERROR TC" {
		t.Errorf("got %s", text(got))
	}
}

func TestZoneTransferIsForwarded(t *testing.T) {
	t.Parallel()
	upstream := newFakeServer(t, ".", "")
	soa := rr(t, "example.com. 30 IN SOA ns.example.com. h.example.com. 1 2 3 4 5")
	upstream.setAnswer(func(w dns.ResponseWriter, q *dns.Msg) bool {
		if q.Question[0].Qtype != dns.TypeAXFR {
			return false
		}
		ch := make(chan *dns.Envelope, 3)
		ch <- &dns.Envelope{RR: []dns.RR{soa, rr(t, "a.example.com. 30 IN A 192.0.2.1")}}
		ch <- &dns.Envelope{RR: []dns.RR{rr(t, "b.example.com. 30 IN A 192.0.2.2")}}
		ch <- &dns.Envelope{RR: []dns.RR{soa}}
		close(ch)
		return new(dns.Transfer).Out(w, q, ch) == nil
	})
	_, addr := newResolver(t, upstream.addr)
	envelopes, err := new(dns.Transfer).In(new(dns.Msg).SetAxfr("example.com."), addr.String())
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for e := range envelopes {
		if e.Error != nil {
			t.Fatal(e.Error)
		}
		count += len(e.RR)
	}
	if count != 4 {
		t.Errorf("got %d records, want 4", count)
	}
}

func TestQueriesThatReturnToTheResolverFail(t *testing.T) {
	t.Parallel()
	var log testenv.Buffer
	r, addr := newResolverWith(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}, serverTimeout)
	r.SetUpstreams([]netip.AddrPort{addr})
	for _, network := range []string{"udp", "tcp"} {
		if got := text(query(t, network, addr, newQuery("www.example.com", dns.TypeA))); got != "SERVFAIL" {
			t.Errorf("got %s", got)
		}
	}
	if n := strings.Count(log.String(), "return to this resolver"); n != 1 {
		t.Errorf("%d warnings, want 1:\n%s", n, log.String())
	}
}

// Two clients may ask the same: the ID of one can be that with which the resolver has sent the other's question.
func TestQueryWithTheIDOfOneInFlightIsAnswered(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"udp", "tcp"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			var asked atomic.Bool
			second := make(chan string, 1)
			w.upstream.setAnswer(func(_ dns.ResponseWriter, q *dns.Msg) bool {
				if asked.CompareAndSwap(false, true) {
					same := newQuery("printer", dns.TypeA)
					same.Id = q.Id
					second <- text(query(t, network, w.addr, same))
				}
				return false
			})
			const want = "NOERROR printer. A 192.0.2.4"
			if got := text(query(t, network, w.addr, newQuery("printer", dns.TypeA))); got != want {
				t.Errorf("the first gets %s", got)
			}
			if got := <-second; got != want {
				t.Errorf("the second gets %s", got)
			}
		})
	}
}
