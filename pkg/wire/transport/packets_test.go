package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

func TestPacketsKeepTheirBoundaries(t *testing.T) {
	for _, n := range networks {
		t.Run(n.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, n.make(t), transport.ClientConfig{}, transport.ServerConfig{})
			a, b := openPackets(t, r.laptop, r.manager)
			sizes := []int{0, 1, 2, 511, 512, 1023, 1024, 1025, 1500, 2046, 2047, 9000, 65506, 65507}
			go func() {
				for round := range 20 {
					for _, size := range sizes {
						if err := a.WritePacket(bytes.Repeat([]byte{byte(round + size)}, size)); err != nil {
							t.Error(err)
						}
					}
				}
				a.Close()
			}()
			buf := make([]byte, transport.MaxPacket)
			for round := range 20 {
				for _, size := range sizes {
					n, err := b.ReadPacket(buf)
					if want := bytes.Repeat([]byte{byte(round + size)}, size); err != nil || !bytes.Equal(buf[:n], want) {
						t.Fatalf("round %d: %d bytes, %v; want %d", round, n, err, size)
					}
				}
			}
			if _, err := b.ReadPacket(buf); err != io.EOF {
				t.Errorf("at the end: %v, want EOF", err)
			}
			if err := b.WritePacket(nil); err == nil {
				t.Error("writing after the other end's close succeeds")
			}
			check(t, b.Close())
			testenv.Until(t, "no stream is left", func() bool {
				return r.laptop.Stats().Streams == 0 && r.manager.Stats().Streams == 0
			})
		})
	}
}

func TestPacketsBeforeAccept(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	p, err := r.laptop.OpenPackets(context.Background(), udpRequest)
	check(t, err)
	check(t, p.WritePacket([]byte("first")))
	check(t, p.Close())
	in, err := r.manager.Accept(context.Background())
	check(t, err)
	if _, err := in.Accept(); err == nil {
		t.Error("datagrams were accepted as bytes")
	}
	testenv.Until(t, "the end arrives", func() bool { return r.manager.Stats().Streams == 0 })
	// Packets from before the end can still be read.
	q, err := in.AcceptPackets()
	if err == nil {
		buf := make([]byte, 10)
		n, err := q.ReadPacket(buf)
		if string(buf[:n]) != "first" || err != nil {
			t.Errorf("%q, %v", buf[:n], err)
		}
	} else {
		t.Errorf("accepting: %v", err)
	}
}

func TestRejectedPacketsReturnTheCode(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	p, err := r.laptop.OpenPackets(context.Background(), udpRequest)
	check(t, err)
	in, err := r.manager.Accept(context.Background())
	check(t, err)
	check(t, in.Reject(transport.CodeProhibited))
	if _, err := p.ReadPacket(nil); !errors.Is(err, syscall.EACCES) {
		t.Errorf("got %v, want EACCES", err)
	}
	if err := p.WritePacket(nil); !errors.Is(err, syscall.EACCES) {
		t.Errorf("got %v, want EACCES", err)
	}
}

func TestPacketsEndWithCode(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := openPackets(t, r.laptop, r.manager)
	check(t, b.WritePacket([]byte("one")))
	check(t, b.CloseWithCode(transport.CodeRefused))
	check(t, b.Close())
	buf := make([]byte, 2)
	if n, err := a.ReadPacket(buf); n != 2 || err != io.ErrShortBuffer {
		t.Errorf("read %d bytes, %v; want 2 and io.ErrShortBuffer", n, err)
	}
	if _, err := a.ReadPacket(buf); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v, want ECONNREFUSED", err)
	}
	if err := a.WritePacket(buf); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v, want ECONNREFUSED", err)
	}
}

func TestPacketsRejectWhatDoesNotFit(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{Links: 1}, transport.ServerConfig{})
	a, b := openPackets(t, r.laptop, r.manager)
	if err := a.WritePacket(make([]byte, transport.MaxPacket+1)); err != transport.ErrPacketTooLarge {
		t.Errorf("got %v", err)
	}
	check(t, b.SetReadDeadline(time.Now().Add(time.Millisecond)))
	if err := b.Wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	check(t, b.SetReadDeadline(time.Time{}))
	// An unread flow blocks its writer rather than grow without bound or drop.
	wrote := make(chan int, 1)
	go func() {
		n := 0
		for a.WritePacket([]byte{1}) == nil {
			n++
		}
		wrote <- n
	}()
	testenv.Until(t, "the window is full", func() bool { return r.manager.Stats().Links[0].Received > (256<<10)-4096 })
	var buf [1]byte
	for range 100_000 {
		_, err := b.ReadPacket(buf[:])
		check(t, err)
	}
	check(t, b.Close())
	if n := receive(t, wrote); n < 100_000 {
		t.Errorf("wrote %d", n)
	}
}

func ExamplePackets() {
	fmt.Println(transport.CodeRefused.Err())
	// Output: far end: connection refused
}

func TestWriteDeadlineEndsWritePacket(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	near, far := openPackets(t, r.laptop, r.manager)
	defer far.Close()
	defer near.Close()
	check(t, near.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
	var err error
	for err == nil { // until the window is full: nobody reads
		err = near.WritePacket(make([]byte, 1000))
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestReadPacketsReadsWhatFits(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := openPackets(t, r.laptop, r.manager)
	sizes := []int{0, 1, 1200, 1200, 700, 65507, 2000, 0, 3}
	for i, size := range sizes {
		check(t, a.WritePacket(bytes.Repeat([]byte{byte(i)}, size)))
	}
	check(t, a.Close())
	buf, got := make([]byte, transport.MaxPacket), make([]int, 4)
	for i := 0; i < len(sizes); {
		n, err := b.ReadPackets(buf, got)
		if err != nil || n == 0 {
			t.Fatalf("%d datagrams, %v", n, err)
		}
		at := buf
		for _, size := range got[:n] {
			if size != sizes[i] || !bytes.Equal(at[:size], bytes.Repeat([]byte{byte(i)}, size)) {
				t.Errorf("datagram %d has %d bytes", i, size)
			}
			at = at[size:]
			i++
		}
	}
	if n, err := b.ReadPackets(buf, got); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d, %v", n, err)
	}
}

func TestReadPacketsLosesTheRestOfALongDatagram(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := openPackets(t, r.laptop, r.manager)
	check(t, a.WritePacket([]byte("longer")))
	check(t, a.WritePacket([]byte("next")))
	buf, sizes := make([]byte, 4), make([]int, 2)
	if n, err := b.ReadPackets(buf, sizes); err != io.ErrShortBuffer || n != 1 || sizes[0] != 4 || string(buf) != "long" {
		t.Errorf("%d datagrams of %v, %q, %v", n, sizes, buf, err)
	}
	if n, err := b.ReadPackets(buf, sizes); err != nil || n != 1 || string(buf[:sizes[0]]) != "next" {
		t.Errorf("%d datagrams of %v, %q, %v", n, sizes, buf, err)
	}
}

// TestTryWritePacketsStopsWhereItWouldBlock writes to a stream whose other end does not read.
func TestTryWritePacketsStopsWhereItWouldBlock(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := openPackets(t, r.laptop, r.manager)
	piece, written := make([]byte, 40*1200+100), 0
	for {
		n, err := a.TryWritePackets(piece, 1200)
		check(t, err)
		written += n
		if n < 41 && written > 41 {
			break
		}
	}
	if n, err := a.TryWritePackets(make([]byte, 65508), 65508); err != transport.ErrPacketTooLarge {
		t.Errorf("%d datagrams that are too large, %v", n, err)
	}
	check(t, a.Close())
	if _, err := a.TryWritePackets(nil, 0); err == nil {
		t.Error("writing after Close succeeds")
	}
	buf := make([]byte, transport.MaxPacket)
	for i := range written {
		want := 1200
		if i%41 == 40 {
			want = 100
		}
		if n, err := b.ReadPacket(buf); n != want || err != nil {
			t.Fatalf("datagram %d of %d: %d bytes, %v; want %d", i, written, n, err, want)
		}
	}
	if _, err := b.ReadPacket(buf); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}
