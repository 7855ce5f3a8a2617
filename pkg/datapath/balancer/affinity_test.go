package balancer

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

const threeHours = 3 * time.Hour

func sticky3(endpoints ...Endpoint) []Service {
	s := svc(endpoints...)
	s.Affinity = threeHours
	return []Service{s}
}

func TestAffinityKeepsTheEndpoint(t *testing.T) {
	one, two, three := ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "ready"), ep("10.0.0.3:80", "ready")
	gone := ep("10.0.0.1:80")
	setup := func(t *testing.T) (*Balancer, func(client, want string)) {
		b := New("")
		b.Apply(sticky3(one, two, three), nil)
		return b, func(client, want string) {
			t.Helper()
			p, v := b.Pick(TCP, port("10.96.0.10:80"), client, RoundRobin)
			defer p.Release()
			if got := p.Endpoint().Addr().String(); v != Chosen || got != want {
				t.Errorf("%s was given %s (%v), want %s", client, got, v, want)
			}
		}
	}
	t.Run("per-client", func(t *testing.T) {
		_, picks := setup(t)
		picks("ann", "10.0.0.1")
		picks("bob", "10.0.0.2")
		picks("ann", "10.0.0.1")
		picks("bob", "10.0.0.2")
	})
	t.Run("timeout-counts-from-the-last-use", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, picks := setup(t)
			picks("ann", "10.0.0.1") // turn 1
			time.Sleep(threeHours - time.Second)
			picks("ann", "10.0.0.1") // turn 2
			time.Sleep(threeHours - time.Second)
			picks("ann", "10.0.0.1") // turn 3
			picks("ann", "10.0.0.1") // turn 1
			time.Sleep(threeHours)
			picks("ann", "10.0.0.2") // turn 2, no longer bound
		})
	})
	t.Run("void-when-the-endpoint-goes", func(t *testing.T) {
		b, picks := setup(t)
		picks("ann", "10.0.0.1")
		b.Apply(sticky3(gone, two, three), nil)
		picks("ann", "10.0.0.3") // turn 2 of [two three]
		picks("ann", "10.0.0.3")
	})
	t.Run("void-also-when-the-endpoint-comes-back", func(t *testing.T) {
		b, picks := setup(t)
		picks("ann", "10.0.0.1")
		b.Apply(sticky3(gone, two, three), nil)
		b.Apply(sticky3(one, two, three), nil)
		picks("ann", "10.0.0.2")
	})
	t.Run("survives-other-endpoints-changes", func(t *testing.T) {
		b, picks := setup(t)
		picks("ann", "10.0.0.1")
		picks("bob", "10.0.0.2")
		b.Apply(sticky3(two), nil)
		b.Apply(sticky3(one, two), nil)
		picks("bob", "10.0.0.2")
	})
	t.Run("follows-a-retry", func(t *testing.T) {
		b, picks := setup(t)
		p, _ := b.Pick(TCP, port("10.96.0.10:80"), "ann", RoundRobin)
		p.Next()
		if got := p.Endpoint().Addr().String(); got != "10.0.0.2" {
			t.Fatalf("retried at %s", got)
		}
		picks("ann", "10.0.0.2")
	})
	t.Run("void-when-all-refuse", func(t *testing.T) {
		b, picks := setup(t)
		p, _ := b.Pick(TCP, port("10.96.0.10:80"), "ann", RoundRobin)
		for p.Next() {
		}
		picks("ann", "10.0.0.2") // turn 2
	})
	t.Run("ends-when-the-service-gives-it-up", func(t *testing.T) {
		b, picks := setup(t)
		picks("ann", "10.0.0.1")
		b.Apply([]Service{svc(one, two, three)}, nil)
		picks("ann", "10.0.0.2")
		b.Apply(sticky3(one, two, three), nil)
		picks("ann", "10.0.0.3")
	})
}

// TestAffinityForgetsExpiredClients keeps the table of clients small: laptops choose its keys.
func TestAffinityForgetsExpiredClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New("")
		b.Apply(sticky3(ep("10.0.0.1:80", "ready")), nil)
		for i := range 10_000 {
			p, _ := b.Pick(TCP, port("10.96.0.10:80"), fmt.Sprint(i), RoundRobin)
			p.Release()
			time.Sleep(threeHours / 100)
		}
		v := b.index.Load().ports[key{port("10.96.0.10:80"), TCP}]
		if n := len(v.affinity.clients); n > 300 {
			t.Errorf("%d clients are remembered, of which 100 are not expired", n)
		}
	})
}

// Beyond maxClients, a port forgets the client that used it least recently. Endless identities take bounded memory.
func TestAffinityIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New("")
		b.Apply(sticky3(ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "ready"), ep("10.0.0.3:80", "ready")), nil)
		pick := func(client string) string {
			p, _ := b.Pick(TCP, port("10.96.0.10:80"), client, RoundRobin)
			defer p.Release()
			return p.Endpoint().String()
		}
		ann := pick("ann")
		for i := range maxClients + maxClients/4 {
			time.Sleep(time.Millisecond)
			pick(fmt.Sprint(i))
			if i%1000 == 0 && pick("ann") != ann {
				t.Fatalf("after %d other clients, ann's endpoint changed", i)
			}
		}
		v := b.index.Load().ports[key{port("10.96.0.10:80"), TCP}]
		if n := len(v.affinity.clients); n > maxClients {
			t.Errorf("%d clients", n)
		}
		if _, ok := v.affinity.clients["0"]; ok {
			t.Error("the oldest client is still known")
		}
	})
}

func BenchmarkPickWithAffinity(b *testing.B) {
	bal := New("")
	bal.Apply(sticky3(ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "ready")), nil)
	for i := range maxClients {
		p, _ := bal.Pick(TCP, port("10.96.0.10:80"), fmt.Sprint(i), RoundRobin)
		p.Release()
	}
	vip := port("10.96.0.10:80")
	b.ReportAllocs()
	for b.Loop() {
		p, _ := bal.Pick(TCP, vip, "7", RoundRobin)
		p.Release()
	}
}
