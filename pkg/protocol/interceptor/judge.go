package interceptor

import (
	"net/http"
	"slices"
	"strings"
)

// isKubelet reports whether a User-Agent is that of the kubelet's probes and hooks where the pod's spec sets none.
// Proxies in the pod usually pass it on.
func isKubelet(agent string) bool {
	return strings.HasPrefix(agent, "kube-probe/") || strings.HasPrefix(agent, "kube-lifecycle/")
}

// judge returns where a request goes, and which claims get a copy, wherever they are in the order.
func judge(claims []Claim, r *http.Request) (destination, []*Claim) {
	if isKubelet(r.UserAgent()) {
		return destination{}, nil
	}
	return first(claims, func(c *Claim) bool { return c.matches(r) })
}

// noStore reports whether no cache may keep the answer. Caches keep answers to other methods only if told to (RFC 9111,
// 4), and calls of gRPC, whose answers have no caches, stay as they are.
func (t destination) noStore(method string) bool {
	return !t.application() && t.claim.NoStore && (method == http.MethodGet || method == http.MethodHead)
}

// cacheHeaders tell caches whether to keep an answer: RFC 9111, 5.2, and RFC 9213.
var cacheHeaders = [...]string{"Cache-Control", "Cdn-Cache-Control"}

const noStore = "no-store"

// judgeRaw is judge for a connection or flow that is not HTTP.
func judgeRaw(claims []Claim) (destination, []*Claim) {
	return first(claims, func(c *Claim) bool { return c.all() && !c.Observe })
}

// copied returns the mirrors whose targets get a copy of the request. It counts the request for the others.
func copied(mirrors []*Claim) []*Claim {
	return slices.DeleteFunc(mirrors, func(c *Claim) bool {
		if c.Observe {
			c.Stats.requests.Add(1)
		}
		return c.Observe
	})
}

func first(claims []Claim, matches func(*Claim) bool) (t destination, mirrors []*Claim) {
	for n := range claims {
		c := &claims[n]
		switch {
		case t.claim != nil && !c.Mirror || !matches(c) || c.Target.Away():
		case c.Mirror:
			mirrors = append(mirrors, c)
		default:
			t.claim = c
		}
	}
	return t, mirrors
}
