package transport_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// network is something to run sessions over.
type network struct {
	net.Listener
	dial func(ctx context.Context) (net.Conn, error)
}

func (n network) Dial(ctx context.Context) (net.Conn, error) { return n.dial(ctx) }

func memory(testing.TB) network {
	l := transporttest.NewListener()
	return network{l, l.Dial}
}

func tcp(tb testing.TB) network {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	return network{l, func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	}}
}

func overTLS(tb testing.TB) network {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"manager"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		tb.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	inner := tcp(tb)
	server := &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	return network{tls.NewListener(inner.Listener, server), func(ctx context.Context) (net.Conn, error) {
		c, err := inner.dial(ctx)
		if err != nil {
			return nil, err
		}
		return tls.Client(c, &tls.Config{RootCAs: pool, ServerName: "manager"}), nil
	}}
}

var networks = []struct {
	name string
	make func(testing.TB) network
}{{"pipe", memory}, {"tcp", tcp}, {"tls", overTLS}}

// rig is a client and a server that run until the test ends, or are stopped one by one.
type rig struct {
	tb              testing.TB
	client          *transport.Client
	server          *transport.Server
	laptop, manager *transport.Session
	laptops         chan *transport.Session
	managers        chan *transport.Session
	stopClient      func()
	stopServer      func()
}

func start(tb testing.TB, n network, cc transport.ClientConfig, sc transport.ServerConfig) *rig {
	tb.Helper()
	r := &rig{tb: tb, laptops: make(chan *transport.Session, 16), managers: make(chan *transport.Session, 16)}
	if cc.Dial == nil {
		cc.Dial = n.Dial
	}
	cc.OnSession = func(_ context.Context, s *transport.Session) { r.laptops <- s }
	sc.OnSession = func(_ context.Context, s *transport.Session) { r.managers <- s }
	r.server, r.client = transport.NewServer(sc), transport.NewClient(cc)
	r.stopServer = background(tb, func(ctx context.Context) error { return r.server.Serve(ctx, n) })
	r.stopClient = background(tb, r.client.Run)
	r.next()
	return r
}

// next waits for the next session at both ends.
func (r *rig) next() {
	r.tb.Helper()
	r.laptop, r.manager = receive(r.tb, r.laptops), receive(r.tb, r.managers)
}

func background(tb testing.TB, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := run(ctx); err != nil {
			tb.Errorf("run ended with %v", err)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	tb.Cleanup(stop)
	return stop
}

func receive[T any](tb testing.TB, ch <-chan T) T {
	tb.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(20 * time.Second):
		tb.Fatal("nothing came in 20 s")
		panic("unreachable")
	}
}

var (
	tcpRequest = transport.Request{Proto: transport.ProtoTCP,
		Src: netip.MustParseAddrPort("198.19.0.2:40000"), Dst: netip.MustParseAddrPort("10.96.0.10:80")}
	udpRequest = transport.Request{Proto: transport.ProtoUDP,
		Src: netip.MustParseAddrPort("[fd00::2]:40000"), Dst: netip.MustParseAddrPort("[fd00::10]:53")}
)

// open makes a stream from a to b.
func open(tb testing.TB, a, b *transport.Session) (near, far *transport.Stream) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	accepted := make(chan *transport.Stream, 1)
	go func() {
		defer close(accepted)
		in, err := b.Accept(ctx)
		if err != nil {
			tb.Error(err)
			return
		}
		far, err := in.Accept()
		if err != nil {
			tb.Error(err)
			return
		}
		accepted <- far
	}()
	near, err := a.Open(ctx, tcpRequest)
	if err != nil {
		tb.Fatal(err)
	}
	return near, receive(tb, accepted)
}

func openPackets(tb testing.TB, a, b *transport.Session) (near, far *transport.Packets) {
	tb.Helper()
	near, err := a.OpenPackets(context.Background(), udpRequest)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	in, err := b.Accept(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	far, err = in.AcceptPackets()
	if err != nil {
		tb.Fatal(err)
	}
	return near, far
}

// serve answers every stream with handle.
func serve(tb testing.TB, s *transport.Session, handle func(*transport.Stream)) {
	background(tb, func(ctx context.Context) error {
		for {
			in, err := s.Accept(ctx)
			if err != nil {
				return nil
			}
			go func() {
				if st, err := in.Accept(); err == nil {
					handle(st)
				}
			}()
		}
	})
}

func echo(st *transport.Stream) {
	defer st.Close()
	if _, err := io.Copy(st, st); err == nil {
		st.CloseWrite()
	}
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
