package door

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"kubevpn/pkg/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const refused Reason = "wrong word"

// word admits who says "in".
func word(conn net.Conn) (net.Conn, Reason, error) {
	var b [2]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, HungUp, err
	}
	if string(b[:]) != "in" {
		return nil, refused, nil
	}
	return conn, "", nil
}

// start runs a Door until the test ends.
func start(t *testing.T, l net.Listener, admit func(net.Conn) (net.Conn, Reason, error)) *Door {
	d := New(Config{Name: "door", Listener: l, Admit: admit, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run gives %v", err)
		}
	})
	return d
}

func TestDoor(t *testing.T) {
	l := transporttest.NewListener()
	d := start(t, l, word)
	visit := func(say string) net.Conn {
		t.Helper()
		conn, err := l.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if _, err := io.WriteString(conn, say); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	if got, err := io.ReadAll(visit("no")); len(got) > 0 || err != nil {
		t.Errorf("who is turned away gets %q, %v", got, err)
	}
	if n := d.Turned(refused); n != 1 {
		t.Errorf("%d are counted", n)
	}
	slow := visit("i") // keeps nobody waiting
	welcome := visit("in")
	conn, err := d.Accept()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		conn.Write([]byte("hello"))
		conn.Close()
	}()
	if got, err := io.ReadAll(welcome); string(got) != "hello" || err != nil {
		t.Errorf("who is let in gets %q, %v", got, err)
	}
	visit("in") // and nobody accepts it
	d.Close()
	if _, err := d.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept gives %v", err)
	}
	if got, err := io.ReadAll(slow); len(got) > 0 || err != nil {
		t.Errorf("at the end, who has not shown anything gets %q, %v", got, err)
	}
}

// One address cannot keep the others out, nor all of them the program busy.
func TestCrowd(t *testing.T) {
	d := New(Config{})
	addr := netip.MustParseAddr("192.0.2.1")
	for i := range MaxArriving {
		if i%MaxArrivingFrom == 0 {
			addr = addr.Next()
		}
		if !d.enter(addr) {
			t.Fatalf("connection %d has no place", i)
		}
		if i%MaxArrivingFrom == MaxArrivingFrom-1 && d.enter(addr) {
			t.Fatalf("%v has more places than it should", addr)
		}
	}
	if d.enter(addr.Next()) {
		t.Error("there are more places than there should be")
	}
	for range MaxArrivingFrom {
		d.leave(addr)
	}
	if !d.enter(addr.Next()) || len(d.from) != MaxArriving/MaxArrivingFrom {
		t.Errorf("after some have left: %v", d.from)
	}
}

func certificate(t *testing.T, notAfter time.Time) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: notAfter, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestShake(t *testing.T) {
	good, stranger := certificate(t, time.Now().Add(time.Hour)), certificate(t, time.Now().Add(time.Hour))
	old := certificate(t, time.Now().Add(-time.Hour))
	forged := tls.Certificate{Certificate: good.Certificate, PrivateKey: stranger.PrivateKey}
	pool := x509.NewCertPool()
	for _, c := range []tls.Certificate{good, old} {
		parsed, err := x509.ParseCertificate(c.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		pool.AddCert(parsed)
	}
	errOurs := errors.New("the day is over")
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{good}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}
	for _, test := range []struct {
		name    string
		cert    *tls.Certificate
		version uint16
		check   error
		why     Reason
	}{
		{"good", &good, tls.VersionTLS13, nil, ""},
		{"nothing", nil, tls.VersionTLS13, nil, NoCertificate},
		{"stranger", &stranger, tls.VersionTLS13, nil, BadCertificate},
		{"expired", &old, tls.VersionTLS13, nil, ExpiredCertificate},
		{"without-the-key", &forged, tls.VersionTLS13, nil, NoTLS},
		{"old-version", &good, tls.VersionTLS12, nil, NoTLS},
		{"own-check", &good, tls.VersionTLS13, errOurs, NoTLS},
	} {
		t.Run(test.name, func(t *testing.T) {
			near, far := net.Pipe()
			defer near.Close()
			config := config.Clone()
			config.VerifyConnection = func(tls.ConnectionState) error { return test.check }
			var client sync.WaitGroup
			defer client.Wait()
			client.Go(func() {
				defer near.Close()
				conn := tls.Client(near, &tls.Config{InsecureSkipVerify: true, MaxVersion: test.version,
					GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
						if test.cert == nil {
							return new(tls.Certificate), nil
						}
						return test.cert, nil
					}})
				client.Go(func() { conn.Write([]byte("ping")) })
				var b [1]byte
				conn.Read(b[:]) // what the server says against it, or the end
			})
			defer far.Close()
			conn, why, err := Shake(far, config)
			if why != test.why || (err == nil) != (why == "") || test.check != nil && !errors.Is(err, test.check) {
				t.Fatalf("%q, %v", why, err)
			}
			if why != "" {
				return
			}
			var b [4]byte
			if _, err := io.ReadFull(conn, b[:]); err != nil || string(b[:]) != "ping" {
				t.Errorf("read %q, %v", b, err)
			}
			conn.Close()
		})
	}
	for name, why := range map[string]Reason{"hangs-up": HungUp, "silent": TLSTooSlow} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				defer near.Close()
				if why == HungUp {
					near.Close()
				}
				began := time.Now()
				_, got, err := Shake(far, config)
				if got != why || err == nil {
					t.Errorf("%q, %v", got, err)
				}
				if took := time.Since(began); why == TLSTooSlow && took != tlsPatience {
					t.Errorf("it waits for %v", took)
				}
				far.Close()
			})
		})
	}
}

// However many are turned away, the log has a line a minute of each kind, and knows them all.
func TestTally(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lockedBuffer
		tally := newTally("turned away", slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == slog.LevelKey || a.Key == slog.MessageKey {
				return slog.Attr{}
			}
			return a
		}})))
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { tally.run(ctx) })
		expect := func(when string, lines ...string) {
			t.Helper()
			synctest.Wait()
			want := ""
			for _, l := range lines {
				want += l + "\n"
			}
			if got := log.take(); got != want {
				t.Errorf("%s, the log has\n%swant\n%s", when, got, want)
			}
		}
		tally.add(HungUp, "192.0.2.1:1")
		expect("at once", `reason="hung up" remote=192.0.2.1:1 new=1 total=1`)
		for i := range 1000 {
			tally.add(HungUp, fmt.Sprintf("192.0.2.1:%d", i))
		}
		tally.add(NoTLS, "192.0.2.2:1")
		expect("in the same minute", `reason="no TLS handshake" remote=192.0.2.2:1 new=1 total=1`)
		time.Sleep(time.Minute)
		expect("a minute later", `reason="hung up" remote=192.0.2.1:999 new=1000 total=1001`)
		time.Sleep(time.Hour)
		expect("as long as nothing happens")
		tally.add(HungUp, "192.0.2.3:1")
		tally.add(HungUp, "192.0.2.3:2")
		expect("after an hour", `reason="hung up" remote=192.0.2.3:1 new=1 total=1002`)
		cancel()
		run.Wait()
		expect("at the end", `reason="hung up" remote=192.0.2.3:2 new=1 total=1003`)
		if n := tally.total(HungUp); n != 1003 {
			t.Errorf("%d in all", n)
		}
	})
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.b.String()
	b.b.Reset()
	return s
}
