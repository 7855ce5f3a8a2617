package balancer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
)

// TestUpdatesUnderLoad changes endpoints while flows are picked. The Service has endpoint i only during epoch i, beside
// a constant endpoint. After Apply has returned, no new Pick may return the endpoint of an earlier epoch.
func TestUpdatesUnderLoad(t *testing.T) {
	const epochs = 2000
	b := New("n1")
	set := func(i int) {
		s := svc(Endpoint{Addr: netip.AddrPortFrom(addr("10.0.0.1"), uint16(1000+i)), Ready: true, Serving: true},
			ep("10.0.0.2:1", "ready"))
		s.Affinity = threeHours
		other := Service{Name: Name{"default", fmt.Sprint("n", i%7)}, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 97, 0, byte(i % 7)})},
			Ports: []Port{{Protocol: TCP, Port: 80}}}
		b.Apply([]Service{s, other}, []Name{{"default", fmt.Sprint("n", (i+3)%7)}})
	}
	set(0)
	var published sync.Mutex // guards epoch
	epoch := 0
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for g := range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				published.Lock()
				least := epoch
				published.Unlock()
				p, v := b.Pick(TCP, port("10.96.0.10:80"), fmt.Sprint(g), Scheduler(rand.IntN(4)))
				if v != Chosen {
					t.Errorf("verdict %v", v)
					return
				}
				for ok := true; ok; ok = rand.IntN(3) == 0 && p.Next() {
					if e := p.Endpoint(); e.Addr() == addr("10.0.0.1") && int(e.Port())-1000 < least {
						t.Errorf("picked the endpoint of epoch %d in epoch %d", e.Port()-1000, least)
					}
				}
				p.Stale()
				p.Release()
				b.Pick(TCP, port("10.97.0.3:80"), "x", RoundRobin)
			}
		})
	}
	for i := 1; i < epochs; i++ {
		set(i)
		published.Lock()
		epoch = i
		published.Unlock()
	}
	close(stop)
	wg.Wait()
	v := b.index.Load().ports[key{port("10.96.0.10:80"), TCP}]
	set(epochs) // an update removes endpoints that have no flows and are not in the Service
	if n := len(v.backends); n > 3 {
		t.Errorf("%d endpoints are remembered, of which 2 exist", n)
	}
	for _, u := range v.backends {
		if n := u.active.Load(); n != 0 {
			t.Errorf("%v counts %d flows after all have ended", u.addr, n)
		}
	}
}

// many returns n Services of ten endpoints.
func many(n int) []Service {
	set := make([]Service, n)
	for i := range set {
		hi, lo := byte(i>>8), byte(i)
		endpoints := make([]Endpoint, 10)
		for j := range endpoints {
			endpoints[j] = Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(j), hi, lo}), 8080), Ready: true, Serving: true}
		}
		set[i] = Service{Name: Name{"default", fmt.Sprint("s", i)}, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, hi, lo})},
			Ports: []Port{{Protocol: TCP, Port: 80, Endpoints: endpoints}}}
	}
	return set
}

func TestPickAllocatesNothing(t *testing.T) {
	b := New("")
	b.Apply(many(100), nil)
	dst := port("10.96.0.7:80")
	for _, s := range []Scheduler{RoundRobin, LeastConnection, SourceHash, Random} {
		if n := testing.AllocsPerRun(100, func() {
			p, _ := b.Pick(TCP, dst, "laptop", s)
			p.Stale()
			p.Next()
			p.Release()
		}); n != 0 {
			t.Errorf("%v allocates %v times per pick", s, n)
		}
	}
}

func BenchmarkPick(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		lb := New("")
		lb.Apply(many(n), nil)
		dst := make([]netip.AddrPort, n)
		for i := range dst {
			dst[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)
		}
		for _, s := range []Scheduler{RoundRobin, LeastConnection, SourceHash, Random} {
			b.Run(fmt.Sprintf("%v/%d", s, n), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					p, _ := lb.Pick(TCP, dst[i*7919%n], "laptop", s)
					p.Release()
				}
			})
		}
		b.Run(fmt.Sprintf("not-a-service/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				lb.Pick(TCP, port10, "laptop", RoundRobin)
			}
		})
	}
}

var port10 = port("10.1.2.3:80")

func BenchmarkApply(b *testing.B) {
	set := many(10_000)
	b.Run("endpoints-of-one-of-10000", func(b *testing.B) {
		lb := New("")
		lb.Apply(set, nil)
		b.ReportAllocs()
		for b.Loop() {
			lb.Apply(set[7:8], nil)
		}
	})
	b.Run("add-and-remove-one-of-10000", func(b *testing.B) {
		lb := New("")
		lb.Apply(set, nil)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if i%2 == 0 {
				lb.Apply(nil, []Name{set[7].Name})
			} else {
				lb.Apply(set[7:8], nil)
			}
		}
	})
	b.Run("first-10000", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			New("").Apply(set, nil)
		}
	})
}
