package dial

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

func TestTCPFlowCarriesBytesBothWays(t *testing.T) {
	r := identified(t, "")
	st, err := r.open(t, managertest.TCPPod(t, func(c *net.TCPConn) { io.Copy(c, c); c.CloseWrite() }))
	if err != nil {
		t.Fatal(err)
	}
	sent := make([]byte, 3<<20)
	rand.Read(sent)
	go func() {
		st.Write(sent)
		st.CloseWrite()
	}()
	if got := managertest.ReadAll(t, st); got != string(sent) {
		t.Errorf("%d of %d bytes came back, or different ones", len(got), len(sent))
	}
}

func TestHalfCloseReachesOtherEnd(t *testing.T) {
	t.Run("laptop-first", func(t *testing.T) {
		r := identified(t, "")
		answer := make(chan struct{})
		st, err := r.open(t, managertest.TCPPod(t, func(c *net.TCPConn) {
			got := managertest.ReadAll(t, c) // until the laptop's FIN
			<-answer
			c.Write([]byte("got " + got))
		}))
		if err != nil {
			t.Fatal(err)
		}
		st.Write([]byte("x"))
		st.CloseWrite()
		st.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if _, err := st.Read(make([]byte, 1)); !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
			t.Errorf("the laptop read something before the pod wrote: %v", err)
		}
		close(answer)
		st.SetReadDeadline(time.Now().Add(managertest.Timeout))
		if got := managertest.ReadAll(t, st); got != "got x" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("pod-first", func(t *testing.T) {
		r := identified(t, "")
		got := make(chan string, 1)
		st, err := r.open(t, managertest.TCPPod(t, func(c *net.TCPConn) {
			c.Write([]byte("bye"))
			c.CloseWrite()
			got <- managertest.ReadAll(t, c)
		}))
		if err != nil {
			t.Fatal(err)
		}
		if s := managertest.ReadAll(t, st); s != "bye" {
			t.Errorf("got %q", s)
		}
		if _, err := st.Write([]byte("and you")); err != nil {
			t.Errorf("writing after the pod's FIN: %v", err)
		}
		st.CloseWrite()
		if s := <-got; s != "and you" {
			t.Errorf("the pod got %q", s)
		}
	})
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// reset makes Close send RST.
func reset(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

func TestResetOfPodReachesLaptop(t *testing.T) {
	tests := []struct {
		name string
		pod  func(*net.TCPConn)
		do   func(*transport.Stream)
	}{
		{"at-once", reset, func(*transport.Stream) {}},
		{"after-data", func(c *net.TCPConn) { c.Read(make([]byte, 1)); reset(c) }, func(s *transport.Stream) { s.Write([]byte("x")) }},
		{"after-its-fin", func(c *net.TCPConn) { c.CloseWrite(); c.Read(make([]byte, 1)); reset(c) }, func(s *transport.Stream) {
			managertest.ReadAll(t, s)
			s.Write([]byte("x"))
		}},
		{"after-the-laptops-fin", func(c *net.TCPConn) { io.Copy(io.Discard, c); reset(c) }, func(s *transport.Stream) { s.CloseWrite() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := identified(t, "")
			st, err := r.open(t, managertest.TCPPod(t, tt.pod))
			if errors.Is(err, syscall.ECONNREFUSED) && tt.name == "at-once" {
				return // the reset arrived during the dial
			}
			if err != nil {
				t.Fatal(err)
			}
			tt.do(st)
			// Read returns the reset, unless it has already returned the pod's FIN; then Write does.
			_, readErr := st.Read(make([]byte, 1))
			var writeErr error
			testenv.Until(t, "reset", func() bool {
				_, writeErr = st.Write([]byte("y"))
				return errors.Is(readErr, syscall.ECONNRESET) || errors.Is(writeErr, syscall.ECONNRESET)
			})
		})
	}
}

func TestResetOfLaptopReachesPod(t *testing.T) {
	tests := []struct {
		name  string
		do    func(*transport.Stream)
		after func(*net.TCPConn) error // returns the error that the pod sees
	}{
		{"idle", func(s *transport.Stream) { s.Reset() }, awaitError},
		{"after-its-fin", func(s *transport.Stream) { s.CloseWrite(); s.Reset() }, awaitError},
		{"while-the-pod-does-not-read", func(s *transport.Stream) {
			s.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			s.Write(make([]byte, 64<<20)) // more than all buffers hold
			s.Reset()
		}, awaitError},
		{"while-the-pod-writes", func(s *transport.Stream) { s.Reset() }, func(c *net.TCPConn) error {
			for b := make([]byte, 64<<10); ; {
				if _, err := c.Write(b); err != nil {
					return err
				}
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := identified(t, "")
			seen := make(chan error, 1)
			st, err := r.open(t, managertest.TCPPod(t, func(c *net.TCPConn) {
				seen <- tt.after(c)
			}))
			if err != nil {
				t.Fatal(err)
			}
			tt.do(st)
			select {
			case err := <-seen:
				if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
					t.Errorf("the pod saw %v", err)
				}
			case <-time.After(managertest.Timeout):
				t.Error("the pod saw no reset")
			}
		})
	}
}

// awaitError waits until the socket has an error, without reading.
func awaitError(c *net.TCPConn) error { return awaitReset(c) }

func TestSessionEndResetsPods(t *testing.T) {
	r := identified(t, "")
	seen := make(chan error, 1)
	if _, err := r.open(t, managertest.TCPPod(t, func(c *net.TCPConn) { seen <- awaitError(c) })); err != nil {
		t.Fatal(err)
	}
	r.laptop.Close()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the pod saw %v", err)
	}
}

func TestDialAnswers(t *testing.T) {
	r := identified(t, "")
	closed := testenv.ClosedPort(t, "tcp").String()
	echo := managertest.TCPPod(t, func(c *net.TCPConn) { io.Copy(c, c) })
	tests := []struct {
		name      string
		endpoints []string // of 10.96.0.1:80
		dst       string
		want      error
	}{
		{"pod", nil, echo, nil},
		{"closed-port", nil, closed, syscall.ECONNREFUSED},
		{"mapped-address", nil, "[::ffff:127.0.0.1]:" + portOf(echo), nil},
		{"service", []string{echo}, "10.96.0.1:80", nil},
		{"service-without-endpoints", nil, "10.96.0.1:80", syscall.ECONNREFUSED},
		{"service-without-that-port", []string{echo}, "10.96.0.1:81", syscall.ECONNREFUSED},
		{"one-endpoint-refuses", []string{closed, echo}, "10.96.0.1:80", nil},
		{"all-endpoints-refuse", []string{closed, testenv.ClosedPort(t, "tcp").String()}, "10.96.0.1:80", syscall.ECONNREFUSED},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r.vip(tt.endpoints...)
			for range 4 { // more dials than endpoints, so that each is first once
				if _, err := r.open(t, tt.dst); !errors.Is(err, tt.want) {
					t.Errorf("got %v, want %v", err, tt.want)
				}
			}
		})
	}
}

func portOf(addr string) string { return strconv.Itoa(int(netip.MustParseAddrPort(addr).Port())) }

// The listener's queue is full, so the dial hangs.
func TestCancelledOpenEndsDial(t *testing.T) {
	r := identified(t, "")
	blackhole := managertest.FullListener(t)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := r.laptop.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Dst: netip.MustParseAddrPort(blackhole)})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	} // goleak shows that the dial has ended
}

func TestUnknownVIPTimesOutEarly(t *testing.T) {
	r := identified(t, "")
	r.dialer.InRange = func(netip.Addr) bool { return true }
	if _, err := r.open(t, managertest.FullListener(t)); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("got %v", err) // such as the end of testTimeout, which is less than dialTimeout
	}
}

func TestManyFlowsAtOnce(t *testing.T) {
	r := identified(t, "rr")
	var pods []string
	for range 3 {
		pods = append(pods, managertest.TCPPod(t, func(c *net.TCPConn) { io.Copy(c, c); c.CloseWrite() }))
	}
	r.vip(pods...)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			st, err := r.open(t, "10.96.0.1:80")
			if err != nil {
				t.Error(err)
				return
			}
			go func() {
				st.Write(bytes.Repeat([]byte("abc"), 10_000))
				st.CloseWrite()
			}()
			if n := len(managertest.ReadAll(t, st)); n != 30_000 {
				t.Errorf("%d bytes came back", n)
			}
		})
	}
	wg.Wait()
}

func BenchmarkDownload(b *testing.B) {
	const size = 64 << 20
	r := identified(b, "")
	addr := managertest.TCPPod(b, func(c *net.TCPConn) {
		for chunk := make([]byte, 1<<20); ; {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	st, err := r.open(b, addr)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := io.CopyN(io.Discard, st, size); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUpload(b *testing.B) {
	r := identified(b, "")
	st, err := r.open(b, managertest.TCPPod(b, func(c *net.TCPConn) { io.Copy(io.Discard, c) }))
	if err != nil {
		b.Fatal(err)
	}
	chunk := make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := st.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkConnect(b *testing.B) {
	r := identified(b, "")
	r.vip(managertest.TCPPod(b, func(c *net.TCPConn) {}))
	dst := netip.MustParseAddrPort("10.96.0.1:80")
	b.ReportAllocs()
	for b.Loop() {
		st, err := r.laptop.Open(context.Background(), transport.Request{Proto: transport.ProtoTCP, Dst: dst})
		if err != nil {
			b.Fatal(err)
		}
		st.Reset()
	}
}
