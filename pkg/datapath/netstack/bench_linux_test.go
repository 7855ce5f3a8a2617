package netstack

import (
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

// BenchmarkTransfer moves 1 MiB per iteration between a kernel socket of the laptop and one behind the loopback dialer.
func BenchmarkTransfer(b *testing.B) {
	const block = 1 << 20
	for _, flows := range []int{1, 8} {
		for _, direction := range []string{"up", "down"} {
			b.Run(direction+"/"+map[int]string{1: "1flow", 8: "8flows"}[flows], func(b *testing.B) {
				up := direction == "up"
				port := serve(b, "tcp4", func(c *net.TCPConn) {
					if up {
						io.Copy(io.Discard, c)
					} else {
						var size [8]byte
						io.ReadFull(c, size[:])
						n := int(size[0]) | int(size[1])<<8 | int(size[2])<<16 | int(size[3])<<24
						for range n {
							c.Write(randomBlock()[:block])
						}
					}
				})
				k := newKernel(b, Config{Dialer: loopback()})
				conns := make([]*net.TCPConn, flows)
				for i := range conns {
					conns[i] = k.mustConnect("tcp4", port)
				}
				randomBlock()
				b.SetBytes(block)
				b.ReportAllocs()
				b.ResetTimer()
				before := cpuTime()
				var wg sync.WaitGroup
				for i, c := range conns {
					n := b.N / flows
					if i < b.N%flows {
						n++
					}
					wg.Go(func() {
						if up {
							for range n {
								c.Write(randomBlock()[:block])
							}
							c.CloseWrite()
						} else {
							c.Write([]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24), 0, 0, 0, 0})
						}
						io.Copy(io.Discard, c)
					})
				}
				wg.Wait()
				// The processor time of both ends and the kernel between them varies less than the throughput.
				gigabytes := float64(b.N) * block / 1e9
				b.ReportMetric((cpuTime()-before).Seconds()/gigabytes, "cpu-s/GB")
			})
		}
	}
}

func cpuTime() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkConnect opens and closes a connection per iteration, one after the other.
func BenchmarkConnect(b *testing.B) {
	port := serve(b, "tcp4", func(c *net.TCPConn) { io.Copy(io.Discard, c) })
	k := newKernel(b, Config{Dialer: loopback()})
	b.ReportAllocs()
	err := k.ns.Do(func() error {
		for b.Loop() {
			c, err := net.Dial("tcp4", net.JoinHostPort("10.2.0.9", itoa(port)))
			if err != nil {
				return err
			}
			c.(*net.TCPConn).SetLinger(0) // leave no TIME_WAIT on this machine
			c.Close()
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRoundTrip sends one byte there and back per iteration.
func BenchmarkRoundTrip(b *testing.B) {
	port := serve(b, "tcp4", func(c *net.TCPConn) { io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) })
	k := newKernel(b, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	buf := make([]byte, 1)
	b.ReportAllocs()
	for b.Loop() {
		c.Write(buf)
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUDPRoundTrip(b *testing.B) {
	port := echoUDP(b, "udp4")
	k := newKernel(b, Config{Dialer: loopback()})
	c := k.dialUDP("udp4", port)
	c.SetDeadline(time.Time{})
	buf := make([]byte, 100)
	b.ReportAllocs()
	for b.Loop() {
		c.Write(buf)
		if _, err := c.Read(buf); err != nil {
			b.Fatal(err)
		}
	}
}

// An idle flow takes less than 20 KiB, its goroutines included.
func TestIdleTCPFlowTakesLittleMemory(t *testing.T) {
	const n, limit = 2000, 20 << 10
	streams := make(chan *idleStream, n)
	k := newKernel(t, Config{Dialer: dialer{tcp: dialIdle(streams)}})
	// The first flows allocate what all flows share.
	for range 10 {
		exchange(t, k, streams)
	}
	var conns []*net.TCPConn
	var far []*idleStream
	before := memory()
	for range n {
		c, s := exchange(t, k, streams)
		conns, far = append(conns, c), append(far, s)
	}
	testenv.Until(t, "all are open", func() bool { return k.stack.Stats().TCP.Open == n+10 })
	after := memory()
	// The sockets of the application and this test's bookkeeping are in the same process.
	own := measureOwn(t, n)
	each := (int64(after) - int64(before) - int64(own)) / n
	t.Logf("%d idle flows: %d bytes each (of %d, less %d of the test's own)", n, each, (after-before)/n, own/n)
	if each > limit {
		t.Errorf("%d bytes for an idle flow", each)
	}
	// All flows still carry data.
	for i := range conns {
		if _, err := conns[i].Write([]byte("z")); err != nil {
			t.Fatal(err)
		}
		far[i].wait(t, 2)
	}
	runtime.KeepAlive(conns)
}

// memory returns the bytes of the heap and of goroutine stacks in use.
func memory() uint64 {
	for range 3 { // stacks shrink, and pools are emptied, by one step at a time
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
