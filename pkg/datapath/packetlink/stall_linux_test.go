package packetlink_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// valve stalls a session's conns in each direction: to the manager while there is locked, from the manager while back is
// locked.
type valve struct{ there, back sync.RWMutex }

type valved struct {
	net.Conn
	*valve
}

func (c valved) Write(b []byte) (int, error) {
	c.there.RLock()
	c.there.RUnlock()
	return c.Conn.Write(b)
}

func (c valved) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.back.RLock()
	c.back.RUnlock()
	return n, err
}

// talkerWindow bounds the bytes of a talker that have not come back, so that a slow machine is not flooded: without it
// all flows together send faster than such a machine carries them.
const talkerWindow = 128 << 10

// talker sends blocks at a pace and counts the bytes that come back.
type talker struct {
	pace       time.Duration
	sent, seen atomic.Int64
}

func (k *talker) talk(c net.Conn, stop <-chan struct{}) error {
	tick := time.NewTicker(k.pace)
	defer tick.Stop()
	block := make([]byte, 1<<10)
	for {
		select {
		case <-stop:
			return c.(*net.TCPConn).CloseWrite()
		case <-tick.C:
		}
		if k.sent.Load()-k.seen.Load() >= talkerWindow {
			continue
		}
		n, err := c.Write(block)
		k.sent.Add(int64(n))
		if err != nil {
			return err
		}
	}
}

func (k *talker) listen(c net.Conn) error {
	b := make([]byte, 64<<10)
	for {
		n, err := c.Read(b)
		k.seen.Add(int64(n))
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// When a stalled path moves again, no segment that TCP retransmits overtakes an earlier one. The kernels count the
// segments that they drop because a newer one overtook them; one such segment makes its flow pause for as long again.
//
// The test waits only for conditions, up to its own deadline: for flows, and for the kernel's count of retransmissions.
func TestFlowsContinueAfterAStall(t *testing.T) {
	v := new(valve)
	laptop, manager := newTunnelThrough(t, true, v)
	addr := manager.serve(t, "10.9.0.2:0")
	paces := []time.Duration{5, 20, 1, 5, 5, 50, 2, 5}
	talkers := make([]*talker, 16)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for i := range talkers {
		k := &talker{pace: paces[i%len(paces)] * time.Millisecond}
		talkers[i] = k
		c := laptop.dial(t, addr, "e")
		for _, run := range []func() error{func() error { return k.talk(c, stop) }, func() error { return k.listen(c) }} {
			group.Go(func() {
				if err := run(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	eventually := func(condition func() error) {
		t.Helper()
		testenv.Eventually(t, untilDeadline(t), condition)
	}
	goOn := func() {
		t.Helper()
		began := time.Now()
		for i, k := range talkers {
			sent := k.sent.Load()
			eventually(func() error {
				if seen := k.seen.Load(); seen <= sent {
					return fmt.Errorf("flow %d: %d bytes sent, %d came back", i, sent, seen)
				}
				return nil
			})
		}
		t.Logf("all flows continued within %v", time.Since(began).Round(time.Millisecond))
	}
	retransmit := func(segments int) {
		t.Helper()
		before := laptop.counter(t, "Tcp", "RetransSegs")
		eventually(func() error {
			if n := laptop.counter(t, "Tcp", "RetransSegs") - before; n < segments {
				return fmt.Errorf("the laptop's kernel retransmitted %d segments, want %d", n, segments)
			}
			return nil
		})
	}
	goOn()
	ends := map[string]*end{"laptop": laptop, "manager": manager}
	before := map[string]int{} // a stream that the manager needs before the laptop has opened it may reorder packets
	for name, e := range ends {
		before[name] = e.counter(t, "TcpExt", "PAWSEstab")
	}
	for _, order := range [][2]*sync.RWMutex{{&v.there, &v.back}, {&v.back, &v.there}} {
		v.there.Lock()
		v.back.Lock()
		retransmit(3 * len(talkers))
		order[0].Unlock()
		retransmit(len(talkers)) // the two directions recover at different times
		order[1].Unlock()
		goOn()
	}
	close(stop)
	group.Wait()
	for i, k := range talkers {
		if sent, seen := k.sent.Load(), k.seen.Load(); sent != seen {
			t.Errorf("flow %d: %d bytes sent, %d came back", i, sent, seen)
		}
	}
	for name, e := range ends {
		late := e.counter(t, "TcpExt", "PAWSEstab") - before[name]
		t.Logf("%s: %+v, %d segments retransmitted, %d of them in vain", name, e.sender.Stats(), e.counter(t, "Tcp", "RetransSegs"), e.counter(t, "TcpExt", "TCPDSACKRecv"))
		if late > 0 {
			t.Errorf("%s: newer segments overtook %d segments", name, late)
		}
	}
}

// untilDeadline returns the time that the test has left, less some for its cleanup.
func untilDeadline(t *testing.T) time.Duration {
	deadline, ok := t.Deadline()
	if !ok {
		return time.Hour
	}
	return time.Until(deadline) - 10*time.Second
}

// counter returns one of the kernel's counters (proc_net(5): snmp, netstat): each protocol has a line of names and a line
// of values.
func (e *end) counter(t *testing.T, protocol, name string) (value int) {
	t.Helper()
	out, err := e.Output("cat", "/proc/net/snmp", "/proc/net/netstat")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		switch {
		case fields[0] != protocol+":":
		case names == nil:
			names = fields
		default:
			if i := slices.Index(names, name); i > 0 {
				if _, err := fmt.Sscan(fields[i], &value); err != nil {
					t.Fatal(err)
				}
				return value
			}
		}
	}
	t.Fatalf("the kernel has no counter %s of %s", name, protocol)
	return 0
}
