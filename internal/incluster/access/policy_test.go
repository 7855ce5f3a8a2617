package access

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/pkg/datapath/balancer"
)

// newPolicy returns a Policy for the namespace shop, which learns from ask whether a pod has an address.
func newPolicy(ask func(context.Context, PodRef) (bool, error)) *Policy {
	return New(Config{Namespaces: []string{"shop"}, HasAddress: ask, Logger: slog.New(slog.DiscardHandler)})
}

// claim records that the EndpointSlices of a Service claim an address for these pods.
func (p *Policy) claim(namespace, addr string, pods ...string) {
	var refs []PodRef
	for _, name := range pods {
		refs = append(refs, PodRef{netip.MustParseAddr(addr), namespace, name})
	}
	p.SetClaims(balancer.Name{Namespace: namespace, Name: "web"}, slices.Values(refs))
}

// A proof counts for a while if the API server is away. Otherwise the manager reads each pod once a minute.
func TestProofsOfPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads atomic.Int32
		var down, moved atomic.Bool
		addr := netip.MustParseAddr("10.244.0.7")
		p := newPolicy(func(context.Context, PodRef) (bool, error) {
			reads.Add(1)
			time.Sleep(time.Millisecond) // so that flows meet
			if down.Load() {
				return false, errors.New("connection refused")
			}
			return !moved.Load(), nil
		})
		p.claim("shop", "10.244.0.7", "web")
		p.claim("pay", "10.244.0.8", "db")
		has := func(want bool, wantReads int32) {
			t.Helper()
			reads.Store(0)
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					if _, has := p.pod(addr); has != want {
						t.Errorf("the address has a pod: %v", !want)
					}
				})
			}
			wg.Wait()
			if n := reads.Load(); n != wantReads {
				t.Errorf("%d reads, want %d", n, wantReads)
			}
		}
		has(true, 1)
		time.Sleep(yesTime - time.Second)
		has(true, 0)
		time.Sleep(2 * time.Second)
		has(true, 1)
		down.Store(true)
		time.Sleep(yesTime + time.Second)
		has(true, 1)
		has(true, 0)
		time.Sleep(yesKept - yesTime)
		has(false, 1)
		down.Store(false)
		time.Sleep(noTime + time.Second)
		has(true, 1)
		moved.Store(true)
		time.Sleep(yesTime + time.Second)
		has(false, 1)
		if _, has := p.pod(netip.MustParseAddr("10.244.0.8")); has {
			t.Error("a pod of another namespace counts")
		}
	})
}

// Whoever may write EndpointSlices cannot make a flow read many pods, nor fill the manager's memory.
func TestProofsAreBounded(t *testing.T) {
	reads := 0
	p := newPolicy(func(context.Context, PodRef) (bool, error) { reads++; return false, nil })
	var pods []string
	for i := range 100 {
		pods = append(pods, fmt.Sprint("p", i))
	}
	p.claim("shop", "10.244.0.7", pods...)
	if _, has := p.pod(netip.MustParseAddr("10.244.0.7")); has || reads != maxClaims {
		t.Errorf("%d reads", reads)
	}
	for i := range 2 * maxAnswers {
		p.proofs.record(PodRef{Name: fmt.Sprint(i)}, true, nil, time.Now())
	}
	if n := len(p.proofs.kept); n > maxAnswers {
		t.Errorf("%d proofs", n)
	}
	p.claim("shop", "10.244.0.7")
	if len(p.claims)+len(p.addrs) != 0 {
		t.Errorf("%d claims remain of deleted EndpointSlices", len(p.claims))
	}
}

// While the API server does not answer, its last answer about a user counts.
func TestUncertainReviewsKeepTheLastAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := false
		ask := func(context.Context, PodRef) (bool, error) {
			if down {
				return false, errors.New("webhook: connection refused")
			}
			return true, nil
		}
		log := slog.New(slog.DiscardHandler)
		by, other := NewUser("ann", ask, log), NewUser("bob", ask, log)
		pod := PodRef{Namespace: "shop", Name: "web"}
		if !by.mayForward(pod) {
			t.Fatal("denied")
		}
		down = true
		time.Sleep(yesTime + time.Second)
		if !by.mayForward(pod) {
			t.Error("the last answer does not count")
		}
		if other.mayForward(pod) {
			t.Error("allowed without any answer")
		}
	})
}
