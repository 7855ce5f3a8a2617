package transport_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

func BenchmarkThroughput(b *testing.B) {
	for _, n := range networks {
		for _, streams := range []int{1, 8} {
			b.Run(n.name+"/"+map[int]string{1: "one", 8: "eight"}[streams], func(b *testing.B) {
				r := start(b, n.make(b), transport.ClientConfig{}, transport.ServerConfig{})
				const block = 64 << 10
				b.SetBytes(block)
				b.ReportAllocs()
				var wg sync.WaitGroup
				pairs := make([][2]*transport.Stream, streams)
				for i := range pairs {
					pairs[i][0], pairs[i][1] = open(b, r.laptop, r.manager)
				}
				b.ResetTimer()
				for _, p := range pairs {
					wg.Go(func() {
						buf := make([]byte, block)
						for range b.N/streams + 1 {
							if _, err := p[0].Write(buf); err != nil {
								b.Error(err)
							}
						}
						p[0].CloseWrite()
					})
					wg.Go(func() { io.Copy(io.Discard, p[1]) })
				}
				wg.Wait()
			})
		}
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	for _, n := range networks {
		b.Run(n.name, func(b *testing.B) {
			r := start(b, n.make(b), transport.ClientConfig{}, transport.ServerConfig{})
			near, far := open(b, r.laptop, r.manager)
			go echo(far)
			buf := make([]byte, 1)
			b.ReportAllocs()
			for b.Loop() {
				near.Write(buf)
				if _, err := near.Read(buf); err != nil {
					b.Fatal(err)
				}
			}
			near.Close()
		})
	}
}

func BenchmarkPackets(b *testing.B) {
	r := start(b, tcp(b), transport.ClientConfig{}, transport.ServerConfig{})
	near, far := openPackets(b, r.laptop, r.manager)
	b.ReportAllocs()
	b.SetBytes(1400)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			if _, err := far.ReadPacket(buf); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 1400)
	for b.Loop() {
		if err := near.WritePacket(buf); err != nil {
			b.Fatal(err)
		}
	}
	near.Close()
	<-done
}

// BenchmarkOpen opens, exchanges a byte, and closes, one after another and 64 at once.
func BenchmarkOpen(b *testing.B) {
	run := func(b *testing.B, r *rig) {
		st, err := r.laptop.Open(context.Background(), tcpRequest)
		if err != nil {
			b.Error(err)
			return
		}
		defer st.Close()
		var one [1]byte
		st.Write(one[:])
		st.CloseWrite()
		io.ReadFull(st, one[:])
	}
	b.Run("one", func(b *testing.B) {
		r := start(b, tcp(b), transport.ClientConfig{}, transport.ServerConfig{})
		serve(b, r.manager, echo)
		b.ReportAllocs()
		for b.Loop() {
			run(b, r)
		}
	})
	b.Run("many", func(b *testing.B) {
		r := start(b, tcp(b), transport.ClientConfig{}, transport.ServerConfig{})
		serve(b, r.manager, echo)
		b.ReportAllocs()
		b.SetParallelism(32)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				run(b, r)
			}
		})
	})
}

// TestIdleStreamsTakeLittleMemory bounds the memory of an idle stream: both ends, and a goroutine that waits at each.
func TestIdleStreamsTakeLittleMemory(t *testing.T) {
	const n = 5000
	r := start(t, tcp(t), transport.ClientConfig{}, transport.ServerConfig{})
	serve(t, r.manager, func(st *transport.Stream) { io.Copy(st, st); st.Close() })
	inUse := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	before := inUse()
	streams := make([]*transport.Stream, n)
	var wg sync.WaitGroup
	buf := make([]byte, 100)
	for i := range streams {
		st, err := r.laptop.Open(t.Context(), tcpRequest)
		check(t, err)
		st.Write(buf) // it has been used
		io.ReadFull(st, buf)
		wg.Go(func() { io.Copy(io.Discard, st) })
		streams[i] = st
	}
	per := (int64(inUse()) - int64(before)) / (2 * n)
	t.Logf("%d bytes per idle stream and end, with a waiting goroutine", per)
	if per > 8<<10 {
		t.Errorf("an idle stream costs %d bytes at each end", per)
	}
	for _, st := range streams {
		st.CloseWrite()
	}
	wg.Wait()
}

// slowConn sends no faster than a rate, with little buffering.
type slowConn struct {
	net.Conn
	rate float64 // bytes per second
	next time.Time
}

func (c *slowConn) Write(p []byte) (int, error) {
	now := time.Now()
	if c.next.Before(now) {
		c.next = now
	}
	c.next = c.next.Add(time.Duration(float64(len(p)) / c.rate * 1e9))
	if wait := c.next.Sub(now); wait > time.Millisecond {
		time.Sleep(wait)
	}
	return c.Conn.Write(p)
}

// TestSmallWritesOvertakeBulk measures a byte's round trip while eight streams upload over the same slow link.
func TestSmallWritesOvertakeBulk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memory(t)
		r := start(t, n, transport.ClientConfig{Links: 1, Dial: func(ctx context.Context) (net.Conn, error) {
			c, err := n.Dial(ctx)
			return &slowConn{Conn: c, rate: 20e6}, err
		}}, transport.ServerConfig{})
		serve(t, r.manager, func(st *transport.Stream) {
			if st.LocalAddr().(*net.TCPAddr).Port == 7 {
				echo(st)
			} else {
				io.Copy(io.Discard, st)
			}
		})
		for range 8 {
			st, err := r.laptop.Open(t.Context(), tcpRequest)
			check(t, err)
			t.Cleanup(func() { st.Reset() })
			go func() {
				buf := make([]byte, 64<<10)
				for {
					if _, err := st.Write(buf); err != nil {
						return
					}
				}
			}()
		}
		testenv.Until(t, "the uploads have begun", func() bool { return r.manager.Stats().Links[0].Received > 4<<20 })
		echoRequest := tcpRequest
		echoRequest.Dst = netip.AddrPortFrom(tcpRequest.Dst.Addr(), 7)
		st, err := r.laptop.Open(t.Context(), echoRequest)
		check(t, err)
		var took []time.Duration
		one := make([]byte, 1)
		for range 50 {
			began := time.Now()
			st.Write(one)
			_, err := io.ReadFull(st, one)
			check(t, err)
			took = append(took, time.Since(began))
		}
		st.Close()
		slices.Sort(took)
		t.Logf("round trip beside eight uploads at 20 MB/s: median %s, worst %s", took[25], took[49])
		if took[25] > 20*time.Millisecond {
			t.Errorf("a byte takes %s beside bulk", took[25])
		}
	})
}
