package netstack

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

func TestDialErrorReachesTheApplication(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		err        error
		want4      syscall.Errno // of connect()
		want6      syscall.Errno
		wantCounts FlowStats
	}{
		{"refused", fmt.Errorf("dialing: %w", syscall.ECONNREFUSED), syscall.ECONNREFUSED, syscall.ECONNREFUSED, FlowStats{Refused: 1}},
		{"host", syscall.EHOSTUNREACH, syscall.EHOSTUNREACH, syscall.EHOSTUNREACH, FlowStats{Unreachable: 1}},
		{"net", syscall.ENETUNREACH, syscall.ENETUNREACH, syscall.ENETUNREACH, FlowStats{Unreachable: 1}},
		{"prohibited", syscall.EACCES, syscall.EHOSTUNREACH, syscall.EACCES, FlowStats{Unreachable: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			eachFamily(t, "tcp", func(t *testing.T, network string) {
				k := newKernel(t, Config{Dialer: dialer{tcp: func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
					return nil, tt.err
				}}})
				want := tt.want4
				if network == "tcp6" {
					want = tt.want6
				}
				_, err := k.connect(network, 80, 20*time.Second)
				if !errors.Is(err, want) {
					t.Errorf("connect: %v, want %v", err, want)
				}
				// One dial: the answer to the first SYN ended connect().
				if got := k.stack.Stats().TCP; got != tt.wantCounts {
					t.Errorf("stats %+v, want %+v", got, tt.wantCounts)
				}
			})
		})
	}
}

// A dial that times out sends the application nothing, and the application's next SYN dials again.
func TestSYNAfterASilentDialDialsAgain(t *testing.T) {
	t.Parallel()
	eachFamily(t, "tcp", func(t *testing.T, network string) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		var dials atomic.Int32
		k := newKernel(t, Config{Dialer: dialer{tcp: func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
			if dials.Add(1) == 2 {
				cancel()
			}
			return nil, fmt.Errorf("dialing: %w", syscall.ETIMEDOUT)
		}}})
		_, err := k.connectContext(ctx, network, 80)
		if dials.Load() < 2 || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("connect() ended with %v after %d dials, want it to be pending after 2", err, dials.Load())
		}
	})
}

func TestAddressesReachTheDialer(t *testing.T) {
	eachFamily(t, "tcp", func(t *testing.T, network string) {
		type dialed struct{ src, dst netip.AddrPort }
		got := make(chan dialed, 1)
		k := newKernel(t, Config{Dialer: dialer{tcp: func(ctx context.Context, src, dst netip.AddrPort) (Stream, error) {
			got <- dialed{src, dst}
			return nil, syscall.ECONNREFUSED
		}}})
		k.connect(network, 8080, 20*time.Second)
		d := <-got
		local := netip.MustParseAddr("10.1.0.1")
		if network == "tcp6" {
			local = netip.MustParseAddr("fd01::1")
		}
		if d.dst != netip.AddrPortFrom(pod(network), 8080) || d.src.Addr() != local || d.src.Port() == 0 {
			t.Errorf("dialed %v from %v", d.dst, d.src)
		}
	})
}

func TestTransferIsIntact(t *testing.T) {
	const size = 64 << 20
	eachFamily(t, "tcp", func(t *testing.T, network string) {
		sums := make(chan [32]byte, 1)
		port := serve(t, network, func(c *net.TCPConn) {
			// A checksum of what comes, and bytes back at the same time.
			var wg sync.WaitGroup
			wg.Go(func() {
				h := sha256.New()
				io.Copy(h, c)
				sums <- [32]byte(h.Sum(nil))
			})
			sendRandom(c, size)
			c.CloseWrite()
			wg.Wait()
		})
		k := newKernel(t, Config{Dialer: loopback()})
		c := k.mustConnect(network, port)
		var wg sync.WaitGroup
		var sent [32]byte
		wg.Go(func() {
			sent = sendRandom(c, size)
			c.CloseWrite()
		})
		h := sha256.New()
		n, err := io.Copy(h, c)
		if err != nil || n != size {
			t.Errorf("received %d bytes, %v", n, err)
		}
		wg.Wait()
		if <-sums != sent {
			t.Error("upload: checksums differ")
		}
		if [32]byte(h.Sum(nil)) != expected(size) {
			t.Error("download: checksums differ")
		}
		g := k.stack.gv.Stats()
		if n := g.DroppedPackets.Value(); n != 0 {
			t.Errorf("gVisor dropped %d packets", n)
		}
		// A busy machine may keep an ACK waiting for longer than the timeout.
		t.Logf("%d segments sent, %d of them again", g.TCP.SegmentsSent.Value(), g.TCP.Retransmits.Value())
		if s := k.stack.Stats().TCP; s.BytesIn != size || s.BytesOut != size {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestServerMaySpeakFirst(t *testing.T) {
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		io.WriteString(c, "220 ready\r\n")
		io.Copy(io.Discard, c)
	})
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	buf := make([]byte, 100)
	if n, err := c.Read(buf); err != nil || string(buf[:n]) != "220 ready\r\n" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
}

func TestOneByteWritesArriveInOrder(t *testing.T) {
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		buf := make([]byte, 1)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			c.Write(buf)
		}
	})
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	c.SetDeadline(time.Now().Add(30 * time.Second))
	const size = 20000
	go func() {
		for i := range size {
			if _, err := c.Write([]byte{byte(i)}); err != nil {
				return
			}
		}
		c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || len(got) != size {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	for i := range got {
		if got[i] != byte(i) {
			t.Fatalf("byte %d is %d", i, got[i])
		}
	}
}

// As with printf x | nc -N, the server answers long after the FIN.
func TestHalfCloseReachesTheServer(t *testing.T) {
	t.Parallel()
	eachFamily(t, "tcp", func(t *testing.T, network string) {
		port := serve(t, network, func(c *net.TCPConn) {
			got, _ := io.ReadAll(c)
			time.Sleep(5 * time.Second) // the server works for longer than any grace period of the stack
			fmt.Fprintf(c, "got %q", got)
		})
		k := newKernel(t, Config{Dialer: loopback()})
		c := k.mustConnect(network, port)
		io.WriteString(c, "x")
		c.CloseWrite()
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if b, err := io.ReadAll(c); err != nil || string(b) != `got "x"` {
			t.Errorf("read %q, %v", b, err)
		}
	})
}

func TestHalfCloseReachesTheApplication(t *testing.T) {
	t.Parallel()
	got := make(chan string, 1)
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		io.WriteString(c, "bye")
		c.CloseWrite()
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Fatalf("read %q, %v", b, err)
	}
	time.Sleep(3 * time.Second) // the application works
	io.WriteString(c, "one more thing")
	c.Close()
	if b := <-got; b != "one more thing" {
		t.Errorf("the server got %q", b)
	}
}

func TestResetReachesTheApplication(t *testing.T) {
	eachFamily(t, "tcp", func(t *testing.T, network string) {
		for _, unread := range []bool{false, true} {
			t.Run(fmt.Sprintf("unread=%v", unread), func(t *testing.T) {
				sent := make(chan struct{})
				port := serve(t, network, func(c *net.TCPConn) {
					if unread {
						io.WriteString(c, "some data")
					}
					<-sent
					c.SetLinger(0)
				})
				k := newKernel(t, Config{Dialer: loopback()})
				c := k.mustConnect(network, port)
				c.SetReadDeadline(time.Now().Add(20 * time.Second))
				if unread {
					testenv.Until(t, "data arrives", func() bool { return k.stack.Stats().TCP.BytesIn > 0 })
				}
				close(sent)
				_, err := io.ReadAll(c)
				if err := isReset(err); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// The server resets while both sides send.
func TestResetReachesABusyApplication(t *testing.T) {
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		go io.Copy(io.Discard, io.LimitReader(c, 10<<20))
		sendRandom(c, 10<<20)
		c.SetLinger(0)
	})
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	c.SetDeadline(time.Now().Add(20 * time.Second))
	written := make(chan error)
	go func() {
		for {
			if _, err := c.Write(randomBlock()); err != nil {
				written <- err
				return
			}
		}
	}()
	_, err := io.Copy(io.Discard, c)
	// The kernel reports an RST only to the first call, Read or Write.
	if err := isReset(errors.Join(err, <-written)); err != nil {
		t.Error(err)
	}
	testenv.Until(t, "the flow ends", func() bool { return k.stack.Stats().TCP.Open == 0 })
}

func TestResetReachesTheServer(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		act  func(t *testing.T, c *net.TCPConn, server *serverSide)
	}{
		{"idle", func(t *testing.T, c *net.TCPConn, server *serverSide) {}},
		{"after_data", func(t *testing.T, c *net.TCPConn, server *serverSide) { io.WriteString(c, "data") }},
		{"after_its_fin", func(t *testing.T, c *net.TCPConn, server *serverSide) {
			c.CloseWrite()
			<-server.eof
		}},
		{"with_unread_data", func(t *testing.T, c *net.TCPConn, server *serverSide) {
			io.WriteString(server.conn, "never read")
			buf := make([]byte, 1)
			c.Read(buf)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			accepted := make(chan *serverSide, 1)
			result := make(chan error, 1)
			port := serve(t, "tcp4", func(c *net.TCPConn) {
				s := &serverSide{conn: c, eof: make(chan struct{})}
				accepted <- s
				_, err := io.Copy(io.Discard, c)
				close(s.eof)
				if err == nil { // after a FIN, an RST shows only when writing
					for err == nil {
						_, err = c.Write([]byte("x"))
						time.Sleep(10 * time.Millisecond) // not to fill the buffers
					}
					if errors.Is(err, syscall.EPIPE) {
						err = syscall.ECONNRESET
					}
				}
				result <- err
			})
			k := newKernel(t, Config{Dialer: loopback()})
			c := k.mustConnect("tcp4", port)
			tt.act(t, c, <-accepted)
			c.SetLinger(0)
			c.Close()
			select {
			case err := <-result:
				if err := isReset(err); err != nil {
					t.Error(err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the server's connection did not end")
			}
			testenv.Until(t, "the flow ends", func() bool { return k.stack.Stats().TCP.Open == 0 })
		})
	}
}

type serverSide struct {
	conn *net.TCPConn
	eof  chan struct{}
}

// The RST reaches a server that does not read the application's data.
func TestResetReachesABlockedServer(t *testing.T) {
	t.Parallel()
	result := make(chan error, 1)
	resume := make(chan struct{})
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		<-resume
		_, err := io.Copy(io.Discard, c)
		result <- err
	})
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	c.SetWriteDeadline(time.Now().Add(2 * time.Second))
	for {
		if _, err := c.Write(randomBlock()); err != nil {
			break // all buffers on the way are full
		}
	}
	c.SetLinger(0)
	c.Close()
	testenv.Until(t, "the flow ends", func() bool { return k.stack.Stats().TCP.Open == 0 })
	close(resume)
	if err := isReset(<-result); err != nil {
		t.Error(err)
	}
}

// When the server reads again, nothing is lost.
func TestSlowServerStopsTheApplication(t *testing.T) {
	const size = 64 << 20
	resume := make(chan struct{})
	sum := make(chan [32]byte, 1)
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		<-resume
		h := sha256.New()
		io.Copy(h, c)
		sum <- [32]byte(h.Sum(nil))
	})
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	go func() {
		sendRandom(c, size)
		c.CloseWrite()
	}()
	var before uint64
	testenv.Until(t, "the flow stops", func() bool {
		time.Sleep(200 * time.Millisecond)
		now := k.stack.Stats().TCP.BytesOut
		stopped := now > 0 && now == before
		before = now
		return stopped
	})
	if before > size/2 {
		t.Errorf("%d bytes went into buffers", before)
	}
	close(resume)
	if <-sum != expected(size) {
		t.Error("checksums differ")
	}
}

// When the application reads again, nothing is lost.
func TestSlowApplicationStopsTheServer(t *testing.T) {
	const size = 64 << 20
	port := serve(t, "tcp4", func(c *net.TCPConn) { sendRandom(c, size) })
	k := newKernel(t, Config{Dialer: loopback()})
	c := k.mustConnect("tcp4", port)
	var before uint64
	testenv.Until(t, "the flow stops", func() bool {
		time.Sleep(200 * time.Millisecond)
		now := k.stack.Stats().TCP.BytesIn
		stopped := now > 0 && now == before
		before = now
		return stopped
	})
	if before > size/2 {
		t.Errorf("%d bytes went into buffers", before)
	}
	h := sha256.New()
	if n, err := io.Copy(h, c); n != size || err != nil {
		t.Errorf("received %d bytes, %v", n, err)
	}
	if [32]byte(h.Sum(nil)) != expected(size) {
		t.Error("checksums differ")
	}
}

// An application that vanishes without FIN or RST is detected, also after its FIN.
func TestKeepAliveDetectsAVanishedApplication(t *testing.T) {
	t.Parallel()
	for _, halfClosed := range []bool{false, true} {
		t.Run(fmt.Sprintf("half-closed=%v", halfClosed), func(t *testing.T) {
			fin := make(chan struct{})
			result := make(chan error, 1)
			port := serve(t, "tcp4", func(c *net.TCPConn) {
				_, err := io.Copy(io.Discard, c)
				close(fin)
				for err == nil {
					_, err = c.Write(nil)
					if wasReset(c) {
						err = syscall.ECONNRESET
					}
					time.Sleep(10 * time.Millisecond) // polled, since nothing may be sent
				}
				result <- err
			})
			k := newKernel(t, Config{Dialer: loopback(), KeepAliveIdle: 300 * time.Millisecond, KeepAliveInterval: 100 * time.Millisecond})
			c := k.mustConnect("tcp4", port)
			if halfClosed {
				c.CloseWrite()
				<-fin
			}
			// It lives while its kernel answers.
			time.Sleep(1500 * time.Millisecond)
			if n := k.stack.Stats().TCP.Open; n != 1 {
				t.Fatalf("%d flows are open", n)
			}
			k.ns.Run("ip", "addr", "flush", "dev", "t0")
			select {
			case err := <-result:
				if err := isReset(err); err != nil {
					t.Error(err)
				}
			case <-time.After(20 * time.Second):
				t.Error("nothing happened")
			}
		})
	}
}

// The application's socket has a small MSS.
func TestSmallSegmentsAreCarried(t *testing.T) {
	const size = 4 << 20
	port := serve(t, "tcp4", func(c *net.TCPConn) { io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}); c.CloseWrite() })
	k := newKernel(t, Config{Dialer: loopback()})
	for _, mss := range []int{88, 536} {
		var conn net.Conn
		err := k.ns.Do(func() (err error) {
			d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
				var err error
				c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, mss) })
				return err
			}}
			conn, err = d.Dial("tcp4", netip.AddrPortFrom(pod("tcp4"), port).String())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(30 * time.Second))
		go func() {
			sendRandom(conn, size)
			conn.(*net.TCPConn).CloseWrite()
		}()
		h := sha256.New()
		if n, err := io.Copy(h, conn); n != size || err != nil || [32]byte(h.Sum(nil)) != expected(size) {
			t.Errorf("MSS %d: %d bytes came back, %v", mss, n, err)
		}
	}
}

func TestSimultaneousCloseEndsTheFlow(t *testing.T) {
	port := serve(t, "tcp4", func(c *net.TCPConn) {
		c.CloseWrite()
		io.Copy(io.Discard, c)
	})
	k := newKernel(t, Config{Dialer: loopback()})
	for range 50 {
		c := k.mustConnect("tcp4", port)
		c.CloseWrite()
		if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
			t.Errorf("read %q, %v", b, err)
		}
	}
	testenv.Until(t, "the flows end", func() bool { return k.stack.Stats().TCP.Open == 0 })
}
