package interceptor

import (
	"net/http"
	"strings"
)

// probePrefix begins the User-Agent of the kubelet's probes.
const probePrefix = "kube-probe/"

// judge says where a request goes, and which claims get a copy, wherever they are in the order.
func judge(claims []Claim, r *http.Request) (target, []*Claim) {
	if strings.HasPrefix(r.UserAgent(), probePrefix) {
		return target{}, nil
	}
	return first(claims, func(c *Claim) bool { return c.takes(r) })
}

// judgeRaw says the same of what is not HTTP.
func judgeRaw(claims []Claim) (target, []*Claim) {
	return first(claims, (*Claim).all)
}

func first(claims []Claim, takes func(*Claim) bool) (t target, mirrors []*Claim) {
	for n := range claims {
		c := &claims[n]
		switch {
		case t.claim != nil && !c.Mirror || !takes(c) || c.Taker.Away():
		case c.Mirror:
			mirrors = append(mirrors, c)
		default:
			t.claim = c
		}
	}
	return t, mirrors
}
