package manager

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

// udpPod answers every datagram with its name, a colon and the datagram.
func udpPod(t testing.TB, name string) string {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { c.Close() })
	wg.Go(func() {
		b := make([]byte, 65536)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(append([]byte(name+":"), b[:min(n, 60000)]...), from)
		}
	})
	return c.LocalAddr().String()
}

func (r *running) openPackets(t testing.TB, proto transport.Proto, dst string) *transport.Packets {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	p, err := r.laptop.OpenPackets(ctx, transport.Request{Proto: proto, Dst: netip.MustParseAddrPort(dst)})
	if err != nil {
		t.Fatal(err)
	}
	p.SetReadDeadline(time.Now().Add(testTimeout))
	t.Cleanup(func() { p.Close() })
	return p
}

// ask sends a datagram and returns the answer.
func ask(t testing.TB, p *transport.Packets, question string) (string, error) {
	t.Helper()
	if err := p.WritePacket([]byte(question)); err != nil {
		return "", err
	}
	b := make([]byte, 65536)
	n, err := p.ReadPacket(b)
	return string(b[:n]), err
}

// askDatagram opens a flow of datagrams, sends one, and returns the answer.
func (r *running) askDatagram(t testing.TB, proto transport.Proto, dst string) (string, error) {
	t.Helper()
	return ask(t, r.openPackets(t, proto, dst), "  x") // two bytes are the sequence number of a ping
}

func expect(t testing.TB, p *transport.Packets, question, want string) {
	t.Helper()
	if got, err := ask(t, p, question); err != nil || got != want {
		t.Errorf("asked %q, got %q (%v), want %q", question, got, err, want)
	}
}

func TestUDPKeepsBoundaries(t *testing.T) {
	r := identified(t, "")
	a, b := udpPod(t, "a"), udpPod(t, "b")
	t.Run("pod", func(t *testing.T) {
		p := r.openPackets(t, transport.ProtoUDP, a)
		expect(t, p, "one", "a:one")
		expect(t, p, "", "a:")
		big := string(make([]byte, 59_000))
		expect(t, p, big, "a:"+big)
	})
	t.Run("refused", func(t *testing.T) {
		p := r.openPackets(t, transport.ProtoUDP, testenv.ClosedPort(t, "udp").String())
		if _, err := ask(t, p, "x"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("service-without-endpoints", func(t *testing.T) {
		r.vip()
		p := r.openPackets(t, transport.ProtoUDP, "10.96.0.1:80")
		if _, err := ask(t, p, "x"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("flow-stays-and-moves-when-its-endpoint-goes", func(t *testing.T) {
		r.vip(a)
		p := r.openPackets(t, transport.ProtoUDP, "10.96.0.1:80")
		expect(t, p, "1", "a:1")
		r.vip(a, b)
		expect(t, p, "2", "a:2")
		expect(t, p, "3", "a:3")
		r.vip(b)
		expect(t, p, "4", "b:4")
		r.vip() // without any endpoint the flow keeps its own
		expect(t, p, "5", "b:5")
		r.vip(a)
		expect(t, p, "6", "a:6")
	})
	t.Run("laptop-ends-it", func(t *testing.T) {
		p := r.openPackets(t, transport.ProtoUDP, a)
		expect(t, p, "1", "a:1")
		p.Close() // goleak shows that the flow has ended
	})
}

func TestIdleTimerEndsUnusedFlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ended := make(chan time.Duration, 1)
		var idle idleTimer
		idle.start(time.Minute, func() { ended <- time.Since(began) })
		time.Sleep(50 * time.Second)
		idle.touch()
		time.Sleep(30 * time.Second)
		idle.touch()
		if got := <-ended; got != 140*time.Second {
			t.Errorf("ended after %v, want 60 s after the last use at 80 s", got)
		}
	})
}
