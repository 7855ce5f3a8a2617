package balancer

import (
	"fmt"
	"math/rand/v2"
)

// Scheduler selects one of the usable endpoints. The names follow IPVS.
type Scheduler uint8

const (
	// RoundRobin ("rr") selects the endpoints in turn.
	RoundRobin Scheduler = iota
	// LeastConnection ("lc") selects the endpoint with the fewest flows through this manager, in turn among equals.
	LeastConnection
	// SourceHash ("sh") selects the same endpoint for the same client, also after a restart. When endpoints appear or
	// disappear, only their clients move (rendezvous hashing).
	SourceHash
	// Random ("random") selects evenly at random, as kube-proxy does in iptables and nftables mode.
	Random
)

var schedulerNames = [...]string{RoundRobin: "rr", LeastConnection: "lc", SourceHash: "sh", Random: "random"}

func (s Scheduler) String() string { return schedulerNames[s] }

// ParseScheduler returns the scheduler with the name rr, lc, sh or random.
func ParseScheduler(name string) (Scheduler, error) {
	for s, n := range schedulerNames {
		if n == name {
			return Scheduler(s), nil
		}
	}
	return 0, fmt.Errorf("unknown scheduler %q: use rr, lc, sh or random", name)
}

// first returns the index of the endpoint to try first. usable is not empty.
func (s Scheduler) first(v *vip, usable []*backend, client string) int {
	switch n := len(usable); s {
	case LeastConnection:
		return leastActive(usable, int(v.turn.Add(1)-1))
	case SourceHash:
		return rendezvous(usable, hashString(client))
	case Random:
		return rand.IntN(n)
	default:
		return int((v.turn.Add(1) - 1) % uint64(n))
	}
}

func leastActive(usable []*backend, turn int) int {
	n := len(usable)
	start := turn % n
	best, fewest := start, usable[start].active.Load()
	for i := 1; i < n && fewest > 0; i++ {
		at := (start + i) % n
		if a := usable[at].active.Load(); a < fewest {
			best, fewest = at, a
		}
	}
	return best
}

func rendezvous(usable []*backend, client uint64) int {
	best, highest := 0, uint64(0)
	for i, b := range usable {
		if h := mix(client ^ b.hash); h >= highest {
			best, highest = i, h
		}
	}
	return best
}

// hashString is FNV-1a: the same in every process, unlike hash/maphash.
func hashString(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// mix is the finalizer of SplitMix64: every input bit changes every output bit with even odds.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
