package packetlink_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

type network struct {
	net.Listener
	*valve // nil: none
}

func (n network) Dial(ctx context.Context) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", n.Addr().String())
	if err != nil || n.valve == nil {
		return c, err
	}
	return valved{c, n.valve}, nil
}

// end is a kernel of its own, with a TUN device whose packets go over streams.
type end struct {
	*tuntest.Namespace
	device   tun.Device
	sender   *packetlink.Sender
	barriers packetlink.Barriers // of the other end's sender
	bad      atomic.Uint64
}

// read sends the packets of the kernel until the device is closed.
func (e *end) read() {
	for {
		f := packetlink.NewFrame()
		n, err := e.device.Read(f.Buffer())
		if err != nil {
			f.Release()
			return
		}
		f.SetLen(n)
		e.sender.Send(f)
	}
}

// receive writes the packets of a stream to the kernel.
func (e *end) receive(stream io.Reader, number int) {
	pieces := make([][]byte, 1)
	packetlink.Receive(stream, number, &e.barriers, packetlink.DeliverFunc(func(f *packetlink.Frame) {
		pieces[0] = f.Bytes()
		if err := e.device.Writev(pieces); err != nil {
			e.bad.Add(1) // the end of the test closes the device first
		}
		f.Release()
	}), &e.bad)
}

// newTunnel connects two network namespaces, 10.9.0.1 and 10.9.0.2, fd09::1 and fd09::2, by packet streams of one session
// over TCP.
func newTunnel(tb testing.TB, gso bool) (laptop, manager *end) { return newTunnelThrough(tb, gso, nil) }

func newTunnelThrough(tb testing.TB, gso bool, v *valve) (laptop, manager *end) {
	testenv.NeedRoot(tb)
	testenv.NeedPrograms(tb, "ip")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	laptopSession, managerSession := transporttest.PairOver(tb, network{listener, v})

	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	newEnd := func(n int) *end {
		e := &end{Namespace: tuntest.NewNamespace(tb)}
		if err := e.Do(func() (err error) { e.device, err = tuntest.Open("t0", 1400); return err }); err != nil {
			tb.Fatal(err)
		}
		e.Run("ip", "addr", "add", fmt.Sprintf("10.9.0.%d/24", n), "dev", "t0")
		e.Run("ip", "addr", "add", fmt.Sprintf("fd09::%d/64", n), "dev", "t0", "nodad")
		e.Run("ip", "link", "set", "t0", "up")
		return e
	}
	laptop, manager = newEnd(1), newEnd(2)

	lease := netip.MustParseAddr("10.9.0.1")
	laptop.sender = packetlink.NewSender(packetlink.SenderConfig{GSO: gso, Eager: true, Open: func(ctx context.Context, stream int) (io.WriteCloser, error) {
		s, err := laptopSession.Open(ctx, transport.Request{Proto: transport.ProtoIP, Src: netip.AddrPortFrom(lease, uint16(stream))})
		if err != nil {
			return nil, err
		}
		wg.Go(func() { laptop.receive(s, stream) })
		return s, nil
	}})
	var mu sync.Mutex
	var streams [packetlink.Streams]*transport.Stream
	manager.sender = packetlink.NewSender(packetlink.SenderConfig{GSO: gso, Open: func(_ context.Context, stream int) (io.WriteCloser, error) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range []*transport.Stream{streams[stream], streams[0]} {
			if s != nil {
				return s, nil
			}
		}
		return nil, errors.New("no stream is open")
	}})
	wg.Go(func() {
		for {
			in, err := managerSession.Accept(ctx)
			if err != nil {
				return
			}
			s, err := in.Accept()
			if err != nil {
				tb.Error(err)
				return
			}
			stream := int(in.Request.Src.Port())
			mu.Lock()
			streams[stream] = s
			mu.Unlock()
			manager.sender.Renew(stream)
			wg.Go(func() { manager.receive(s, stream) })
		}
	})
	for _, e := range []*end{laptop, manager} {
		wg.Go(func() { e.sender.Run(ctx) })
		wg.Go(e.read)
	}
	tb.Cleanup(func() {
		cancel()
		laptop.device.Close()
		manager.device.Close()
		mu.Lock()
		for _, s := range streams {
			if s != nil {
				s.Reset()
			}
		}
		mu.Unlock()
		wg.Wait()
	})
	return laptop, manager
}

// serve echoes the bytes of a connection that begins with 'e', and discards those of any other.
func (e *end) serve(tb testing.TB, addr string) net.Addr {
	var l net.Listener
	if err := e.Do(func() (err error) { l, err = net.Listen("tcp", addr); return err }); err != nil {
		tb.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				first := make([]byte, 1)
				if _, err := io.ReadFull(c, first); err != nil {
					return
				}
				if first[0] == 'e' {
					io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
				} else {
					io.Copy(io.Discard, struct{ io.Reader }{c})
				}
			})
		}
	})
	tb.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr()
}

func (e *end) dial(tb testing.TB, to net.Addr, kind string) net.Conn {
	var c net.Conn
	if err := e.Do(func() (err error) { c, err = net.DialTimeout("tcp", to.String(), 10*time.Second); return err }); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte(kind)); err != nil {
		tb.Fatal(err)
	}
	return c
}

// Two kernels speak TCP over a real session. Every byte arrives in both directions, with super-packets and with packets
// as on a wire.
func TestTunnelLosesNothing(t *testing.T) {
	for name, gso := range map[string]bool{"whole": true, "split": false} {
		for _, addr := range []string{"10.9.0.2:0", "[fd09::2]:0"} {
			t.Run(name+"_"+addr[:2], func(t *testing.T) {
				laptop, manager := newTunnel(t, gso)
				c := laptop.dial(t, manager.serve(t, addr), "e")
				data := make([]byte, 16<<20)
				rand.Read(data)
				go func() {
					c.Write(data) // the reader reports a failure
					c.(*net.TCPConn).CloseWrite()
				}()
				got, err := io.ReadAll(c)
				if err != nil || !bytes.Equal(got, data) {
					t.Fatalf("%d bytes of %d came back, or others: %v", len(got), len(data), err)
				}
				for _, e := range []*end{laptop, manager} {
					if stats := e.sender.Stats(); stats.Malformed != 0 || e.bad.Load() != 0 {
						t.Errorf("%+v, %d malformed or not taken", stats, e.bad.Load())
					}
				}
			})
		}
	}
}

// BenchmarkTunnel uploads, and measures 1-byte round trips at the same time.
func BenchmarkTunnel(b *testing.B) {
	for name, gso := range map[string]bool{"whole": true, "split": false} {
		b.Run(name, func(b *testing.B) {
			laptop, manager := newTunnel(b, gso)
			addr := manager.serve(b, "10.9.0.2:0")
			bulk, echo := laptop.dial(b, addr, "b"), laptop.dial(b, addr, "e")
			chunk := make([]byte, 1<<20)
			stop, done := make(chan struct{}), make(chan []time.Duration, 1)
			go func() {
				var rtts []time.Duration
				one := make([]byte, 1)
				for {
					select {
					case <-stop:
						done <- rtts
						return
					case <-time.After(2 * time.Millisecond):
					}
					began := time.Now()
					if _, err := echo.Write(one); err != nil {
						b.Error(err)
					}
					if _, err := io.ReadFull(echo, one); err != nil {
						b.Error(err)
					}
					rtts = append(rtts, time.Since(began))
				}
			}()
			b.SetBytes(int64(len(chunk)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bulk.Write(chunk); err != nil {
					b.Fatal(err)
				}
			}
			close(stop)
			rtts := <-done
			slices.Sort(rtts)
			if n := len(rtts); n > 0 {
				b.ReportMetric(float64(rtts[n/2].Microseconds()), "p50-µs")
				b.ReportMetric(float64(rtts[n*99/100].Microseconds()), "p99-µs")
			}
			b.ReportMetric(float64(laptop.sender.Stats().Dropped), "dropped")
		})
	}
}
