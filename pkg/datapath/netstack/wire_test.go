package netstack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun/tuntest"
)

// wire is the application's end of a device in memory, on which tests write single packets.
type wire struct {
	t   testing.TB
	dev *tuntest.Device
}

func newWire(t testing.TB, cfg Config) (*wire, *Stack) {
	ours, theirs := tuntest.Pair(1500, true)
	t.Cleanup(func() { theirs.Close() })
	cfg.Device = ours
	return &wire{t, theirs}, start(t, cfg)
}

var (
	appAddr = netip.MustParseAddrPort("10.1.0.1:40000")
	podAddr = netip.MustParseAddrPort("10.2.0.9:80")
)

const (
	flagFIN = 1
	flagSYN = 2
	flagRST = 4
	flagACK = 16
)

// send writes a TCP packet without data from the application.
func (w *wire) send(flags uint8, seq, ack uint32) { w.sendFrom(appAddr, flags, seq, ack) }

func (w *wire) sendFrom(from netip.AddrPort, flags uint8, seq, ack uint32) {
	w.t.Helper()
	ip := packet.Outgoing{Src: from.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoTCP, PayloadLen: 20}
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], podAddr.Port())
	binary.BigEndian.PutUint32(tcp[4:], seq)
	binary.BigEndian.PutUint32(tcp[8:], ack)
	tcp[12], tcp[13] = 5<<4, flags
	binary.BigEndian.PutUint16(tcp[14:], 65535)
	if err := w.dev.Writev([][]byte{make([]byte, packet.VirtioLen), ip.Append(nil), tcp}); err != nil {
		w.t.Fatal(err)
	}
}

type received struct {
	packet.Header
	raw      []byte // the IP packet
	flags    uint8  // of TCP, as the next two
	seq, ack uint32
}

// dstPort is the application's port.
func (r received) dstPort() uint16 { return binary.BigEndian.Uint16(r.raw[r.HeaderLen+2:]) }

// receive reads the next packet for the application.
func (w *wire) receive() received {
	w.t.Helper()
	timer := time.AfterFunc(10*time.Second, func() { w.dev.SetReadDeadline(time.Unix(1, 0)) })
	defer timer.Stop()
	buf := make([]byte, packet.VirtioLen+packet.MaxLen)
	n, err := w.dev.Read(buf)
	if err != nil {
		w.t.Fatalf("no packet arrived: %v", err)
	}
	h, err := packet.Parse(buf[packet.VirtioLen:n])
	if err != nil {
		w.t.Fatal(err)
	}
	r := received{Header: h, raw: buf[packet.VirtioLen:n]}
	if b := r.raw[h.HeaderLen:]; h.Proto == packet.ProtoTCP {
		r.seq, r.ack, r.flags = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:]), b[13]
	}
	return r
}

// dials is a Dialer whose TCP dials the test answers.
type dials chan *dial

type dial struct {
	ctx    context.Context
	answer chan<- answer
}

type answer struct {
	stream Stream
	err    error
}

func (d dials) dialer() dialer {
	return dialer{tcp: func(ctx context.Context, src, dst netip.AddrPort) (Stream, error) {
		c := make(chan answer)
		d <- &dial{ctx, c}
		select {
		case a := <-c:
			return a.stream, a.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}
}

func TestRepeatedSYNsAreAbsorbed(t *testing.T) {
	d := make(dials)
	w, _ := newWire(t, Config{Dialer: d.dialer()})
	w.send(flagSYN, 1000, 0)
	first := <-d
	w.send(flagSYN, 1000, 0)
	w.send(flagSYN, 1000, 0)
	w.sendFrom(source(1), flagSYN, 1000, 0)
	<-d // of the last one: those before it are absorbed
	first.answer <- answer{err: syscall.ECONNREFUSED}
	if r := w.receive(); r.flags != flagRST|flagACK || r.ack != 1001 || r.Src != podAddr.Addr() {
		t.Errorf("received %+v, want RST", r)
	}
	select {
	case <-d:
		t.Error("dialed again")
	default:
	}
	// The next SYN is a new connection.
	testenv.Until(t, "the SYN is forgotten", func() bool {
		w.send(flagSYN, 2000, 0)
		select {
		case second := <-d:
			second.answer <- answer{err: syscall.EHOSTUNREACH}
			return true
		case <-time.After(10 * time.Millisecond):
			return false
		}
	})
	r := w.receive()
	quote := r.raw[r.HeaderLen+8:]
	if r.Proto != packet.ProtoICMP || r.raw[r.HeaderLen] != 3 || r.raw[r.HeaderLen+1] != 1 ||
		len(quote) != 40 || binary.BigEndian.Uint32(quote[24:]) != 2000 {
		t.Errorf("received % x, want ICMP host unreachable quoting the SYN", r.raw)
	}
}

func TestGivingUpCancelsTheDial(t *testing.T) {
	for _, tt := range []struct {
		name  string
		flags uint8
		seq   uint32
	}{{"rst", flagRST, 1001}, {"another_syn", flagSYN, 5000}} {
		t.Run(tt.name, func(t *testing.T) {
			d := make(dials)
			w, _ := newWire(t, Config{Dialer: d.dialer()})
			w.send(flagSYN, 1000, 0)
			first := <-d
			w.send(tt.flags, tt.seq, 0)
			<-first.ctx.Done()
			testenv.Until(t, "the same ports can be used again", func() bool {
				w.send(flagSYN, 5000, 0)
				select {
				case second := <-d:
					second.answer <- answer{err: syscall.ECONNREFUSED}
					return true
				case <-time.After(10 * time.Millisecond):
					return false
				}
			})
			if r := w.receive(); r.flags != flagRST|flagACK || r.ack != 5001 {
				t.Errorf("received %+v, want RST of the second SYN only", r)
			}
		})
	}
}

// recordStream records the calls of its methods. Its Read waits for Reset.
type recordStream struct {
	ended  chan struct{}
	once   sync.Once
	mu     sync.Mutex
	events []string
}

func newRecordStream() *recordStream { return &recordStream{ended: make(chan struct{})} }

func (s *recordStream) note(event string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, event)
}

func (s *recordStream) all() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprint(s.events)
}

func (s *recordStream) Read([]byte) (int, error)    { <-s.ended; return 0, syscall.ECONNRESET }
func (s *recordStream) Write(p []byte) (int, error) { s.note("write " + string(p)); return len(p), nil }
func (s *recordStream) CloseWrite() error           { s.note("fin"); return nil }
func (s *recordStream) Close() error                { s.note("close"); return nil }
func (s *recordStream) Reset() error {
	s.once.Do(func() { s.note("reset"); close(s.ended) })
	return nil
}

// An application that gives up before the SYN-ACK answers it with RST, which reaches the server.
func TestResetDuringTheHandshakeReachesTheServer(t *testing.T) {
	d := make(dials)
	w, s := newWire(t, Config{Dialer: d.dialer()})
	stream := newRecordStream()
	w.send(flagSYN, 1000, 0)
	(<-d).answer <- answer{stream: stream}
	r := w.receive()
	if r.flags != flagSYN|flagACK || r.ack != 1001 {
		t.Fatalf("received %+v, want SYN-ACK", r)
	}
	w.send(flagRST, 1001, 0)
	testenv.Until(t, "the stream ends", func() bool { return stream.all() == "[reset close]" })
	if n := s.Stats().TCP; n.Total != 0 {
		t.Errorf("stats %+v", n)
	}
}

func TestEndOfRunAbortsFlows(t *testing.T) {
	ours, theirs := tuntest.Pair(1500, true)
	defer theirs.Close()
	w := &wire{t, theirs}
	d := make(dials)
	s, err := New(Config{Device: ours, Dialer: d.dialer()})
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.ListenTCP(netip.MustParseAddrPort("10.2.0.1:53"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stream := newRecordStream()
	w.send(flagSYN, 1000, 0)
	(<-d).answer <- answer{stream: stream}
	syn := w.receive()
	w.send(flagACK, 1001, syn.seq+1)
	testenv.Until(t, "the flow is open", func() bool { return s.Stats().TCP.Open == 1 })
	accepted := make(chan error, 1)
	go func() { _, err := l.Accept(); accepted <- err }()
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if r := w.receive(); r.flags&flagRST == 0 || r.seq != syn.seq+1 {
		t.Errorf("received %+v, want RST", r)
	}
	if got := stream.all(); got != "[reset close]" {
		t.Errorf("the stream saw %s", got)
	}
	if err := <-accepted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
	if _, err := s.ListenUDP(netip.MustParseAddrPort("10.2.0.1:53")); !errors.Is(err, errEnded) {
		t.Errorf("ListenUDP after the end: %v", err)
	}
	if err := s.Run(context.Background()); !errors.Is(err, errEnded) {
		t.Errorf("Run after the end: %v", err)
	}
	l.Close()

	// Another stack can use the device.
	s2, err := New(Config{Device: ours, Dialer: dialer{tcp: func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
		return nil, syscall.ECONNREFUSED
	}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithCancel(context.Background())
	go func() { done <- s2.Run(ctx) }()
	w.send(flagSYN, 9000, 0)
	if r := w.receive(); r.flags != flagRST|flagACK || r.ack != 9001 {
		t.Errorf("received %+v, want RST", r)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestEndOfRunCancelsDials(t *testing.T) {
	d := make(dials)
	w, _ := newWire(t, Config{Dialer: d.dialer()})
	w.send(flagSYN, 1000, 0)
	<-d // the end of the test ends the stack, and start checks that nothing is left
}

func TestRunReturnsTheErrorOfTheDevice(t *testing.T) {
	ours, theirs := tuntest.Pair(1500, true)
	s, err := New(Config{Device: ours, Dialer: dialer{}})
	if err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	if err := s.Run(context.Background()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Run: %v", err)
	}
}

func TestNewRejectsInvalidConfigs(t *testing.T) {
	small, _ := tuntest.Pair(576, true)
	good, _ := tuntest.Pair(1500, true)
	for _, cfg := range []Config{{}, {Device: good}, {Dialer: dialer{}}, {Device: small, Dialer: dialer{}}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New accepts %+v", cfg)
		}
	}
}

// Run ends the goroutines that ListenTCP started, even if its context has already ended.
func TestEndOfRunClosesAnUnusedListener(t *testing.T) {
	ours, _ := tuntest.Pair(1500, true)
	s, err := New(Config{Device: ours, Dialer: dialer{}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.ListenTCP(netip.MustParseAddrPort("[fd02::1]:53"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
}

// lossy drops each packet whose number is a multiple of every.
type lossy struct {
	*tuntest.Device
	every, count atomic.Int64
}

func (d *lossy) Writev(pieces [][]byte) error {
	if every := d.every.Load(); every != 0 && d.count.Add(1)%every == 0 {
		return nil
	}
	return d.Device.Writev(pieces)
}

// Two links face each other: a second gVisor is the application. The test runs on every operating system.
func TestTransferBetweenTwoStacks(t *testing.T) {
	for _, tt := range []struct {
		network string
		gso     bool
		loss    int64
	}{
		{"tcp4", true, 0}, {"tcp4", false, 0}, {"tcp6", true, 0}, {"tcp6", false, 0}, {"tcp4", true, 50}, {"tcp4", false, 300},
	} {
		network := tt.network
		t.Run(fmt.Sprintf("%s_gso=%v_loss=%v", network, tt.gso, tt.loss != 0), func(t *testing.T) {
			port := serve(t, network, func(c *net.TCPConn) { io.Copy(c, c); c.CloseWrite() })
			ours, theirs := tuntest.Pair(1500, tt.gso)
			dev := &lossy{Device: ours}
			dev.every.Store(tt.loss)
			start(t, Config{Device: dev, Dialer: loopback()})

			app := newGVisor()
			var stats counters
			appDev := &lossy{Device: theirs}
			appDev.every.Store(tt.loss)
			l := newLinkEndpoint(appDev, nil, &stats)
			if err := setUp(app, l); err != nil {
				t.Fatal(err)
			}
			received := make(chan error, 1)
			go func() { received <- l.receive() }()
			defer func() {
				theirs.SetReadDeadline(time.Unix(1, 0))
				<-received
				app.Close()
				app.Wait()
			}()

			to := netip.AddrPortFrom(pod(network), port)
			from := netip.AddrPortFrom(appAddr.Addr(), 0)
			if network == "tcp6" {
				from = netip.MustParseAddrPort("[fd01::1]:0")
			}
			c, err := gonet.DialTCPWithBind(context.Background(), app, fullAddress(from), fullAddress(to), networkOf(to.Addr()))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			const size = 4 << 20
			go func() {
				sendRandom(c, size)
				c.CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || len(got) != size {
				t.Fatalf("%d bytes came back, %v", len(got), err)
			}
			block := randomBlock()
			for i, b := range got {
				if b != block[i%len(block)] {
					t.Fatalf("byte %d differs", i)
				}
			}
		})
	}
}

// pod returns the cluster address of a family.
func pod(network string) netip.Addr {
	if network[len(network)-1] == '6' {
		return netip.MustParseAddr("fd02::9")
	}
	return netip.MustParseAddr("10.2.0.9")
}

// FuzzDeliver writes arbitrary packets to the stack's device.
func FuzzDeliver(f *testing.F) {
	header := make([]byte, packet.VirtioLen)
	udp := packet.UDP(appAddr, podAddr, []byte("abc"), false)
	ip := packet.Outgoing{Src: appAddr.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoUDP, PayloadLen: 11}
	f.Add(append(append(ip.Append(header), udp[:]...), "abc"...))
	ip.Fragment, ip.MoreFragments, ip.PayloadLen = true, true, 8
	f.Add(append(ip.Append(header), udp[:]...))
	six := packet.Outgoing{Src: netip.MustParseAddr("fd01::1"), Dst: netip.MustParseAddr("fd02::9"), Proto: packet.ProtoICMPv6, PayloadLen: 8}
	f.Add(append(six.Append(header), 128, 0, 0, 0, 1, 2, 3, 4))
	syn := packet.Outgoing{Src: appAddr.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoTCP, PayloadLen: 20}
	f.Add(append(syn.Append(header), 0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0))

	ours, theirs := tuntest.Pair(1500, true)
	go io.Copy(io.Discard, reader{theirs})
	f.Cleanup(func() { theirs.Close() })
	start(f, Config{Device: ours, UDPIdle: time.Second, EchoIdle: time.Second, Dialer: dialer{
		udp: func(context.Context, netip.AddrPort, netip.AddrPort) (PacketStream, error) {
			s := newPackets()
			s.replies = s.requests
			return s, nil
		},
		echo: echoing,
	}})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) <= packet.VirtioLen+packet.MaxLen {
			theirs.Writev([][]byte{b})
		}
	})
}

// reader drains a device.
type reader struct{ d *tuntest.Device }

func (r reader) Read(p []byte) (int, error) {
	buf := make([]byte, packet.VirtioLen+packet.MaxLen)
	n, err := r.d.Read(buf)
	return min(n, len(p)), err
}
