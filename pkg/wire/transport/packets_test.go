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
		t.Errorf("%d, %v; want 2 and a short buffer", n, err)
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
