package dial

import (
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

func TestUDPKeepsBoundaries(t *testing.T) {
	r := identified(t, "")
	a, b := managertest.UDPPod(t, "a"), managertest.UDPPod(t, "b")
	t.Run("pod", func(t *testing.T) {
		p := managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, a)
		managertest.Expect(t, p, "one", "a:one")
		managertest.Expect(t, p, "", "a:")
		big := string(make([]byte, 59_000))
		managertest.Expect(t, p, big, "a:"+big)
	})
	t.Run("refused", func(t *testing.T) {
		p := managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, testenv.ClosedPort(t, "udp").String())
		if _, err := managertest.Ask(t, p, "x"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("service-without-endpoints", func(t *testing.T) {
		r.vip()
		p := managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, "10.96.0.1:80")
		if _, err := managertest.Ask(t, p, "x"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("flow-stays-and-moves-when-its-endpoint-goes", func(t *testing.T) {
		r.vip(a)
		p := managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, "10.96.0.1:80")
		managertest.Expect(t, p, "1", "a:1")
		r.vip(a, b)
		managertest.Expect(t, p, "2", "a:2")
		managertest.Expect(t, p, "3", "a:3")
		r.vip(b)
		managertest.Expect(t, p, "4", "b:4")
		r.vip() // without any endpoint the flow keeps its own
		managertest.Expect(t, p, "5", "b:5")
		r.vip(a)
		managertest.Expect(t, p, "6", "a:6")
	})
	t.Run("laptop-ends-it", func(t *testing.T) {
		p := managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, a)
		managertest.Expect(t, p, "1", "a:1")
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
