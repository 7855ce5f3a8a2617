package dial

import (
	"bytes"
	"net"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// socketPair returns two udpSockets that are connected to each other over loopback.
func socketPair(t testing.TB) (a, b *udpSocket) {
	t.Helper()
	var c [2]*net.UDPConn
	for i := range c {
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		c[i] = conn
	}
	for i, conn := range c {
		raw, err := conn.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		to := c[1-i].LocalAddr().(*net.UDPAddr)
		err = raw.Control(func(fd uintptr) {
			err := unix.Connect(int(fd), &unix.SockaddrInet4{Port: to.Port, Addr: [4]byte(to.IP.To4())})
			if err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	var s [2]*udpSocket
	for i := range c {
		var err error
		if s[i], err = newUDPSocket(c[i]); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s[i].Close() })
	}
	return s[0], s[1]
}

// TestSocketsKeepBoundaries sends batches of all kinds, to a socket that takes batches and to one that does not.
func TestSocketsKeepBoundaries(t *testing.T) {
	for name, plain := range map[string]bool{"joined": false, "plain": true} {
		t.Run(name, func(t *testing.T) {
			a, b := socketPair(t)
			a.plain = plain || a.plain
			batches := [][]int{{0}, {1}, {1200, 1200, 1200}, {1200, 1}, {65507}, {30000, 30000, 5000}, {700, 700}, {0}}
			var want [][]byte
			for i, sizes := range batches {
				var p []byte
				for j, size := range sizes {
					one := bytes.Repeat([]byte{byte(10*i + j)}, size)
					want = append(want, one)
					p = append(p, one...)
				}
				if err := a.send(p, sizes[0]); err != nil {
					t.Fatalf("%v: %v", sizes, err)
				}
			}
			var got [][]byte
			err := b.receive(&buffers{}, func(p []byte, size int) error {
				for one := range each(p, size) {
					got = append(got, bytes.Clone(one))
				}
				if len(got) >= len(want) {
					return net.ErrClosed
				}
				return nil
			})
			if err != net.ErrClosed || !slices.EqualFunc(got, want, bytes.Equal) {
				t.Errorf("%d datagrams arrived, not the %d that were sent: %v", len(got), len(want), err)
			}
		})
	}
}

func BenchmarkSocket(b *testing.B) {
	for name, n := range map[string]int{"one": 1, "fifty": 50} {
		b.Run(name, func(b *testing.B) {
			from, to := socketPair(b)
			p := make([]byte, n*1200)
			got := make(chan int)
			go func() {
				_ = to.receive(&buffers{}, func(p []byte, _ int) error {
					got <- len(p)
					return nil
				})
			}()
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			for b.Loop() {
				if err := from.send(p, 1200); err != nil {
					b.Fatal(err)
				}
				for left := len(p); left > 0; {
					left -= <-got
				}
			}
			to.Close()
		})
	}
}
