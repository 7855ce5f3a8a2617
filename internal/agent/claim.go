package agent

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/interceptor"
	"kubevpn/pkg/match"
)

// Bounds of what an owner may ask for. They are far beyond what anybody does.
const (
	maxID         = 128 // bytes
	maxPorts      = 64  // of a claim
	maxOwnClaims  = 64  // of an owner
	maxOwners     = 256
	maxClonePods  = 1024
	maxNoteBytes  = 256
	maxPortsNotes = 8 // of a port
)

// port is where requests arrive in the pod.
type port struct {
	Protocol string // "tcp" or "udp"
	Port     uint16
}

func portOf(p api.AgentPort) port { return port{p.Protocol, p.Port} }

// claim is who has which requests. It does not change, but for what tick has seen.
type claim struct {
	id     string
	owner  *owner
	by     taker             // the session that it was claimed by
	laptop interceptor.Taker // who gets the requests: by, or a clone
	match  *match.Match
	mirror bool
	ports  []api.AgentPort
	since  time.Time // by this agent's clock
	tls    *tls.Config
	stats  *interceptor.Stats

	awaySince time.Time // zero: it is not, as far as was seen
	requests  uint64    // seen so far
	failure   *interceptor.Failure
}

// count reports whether there is more in the claim's stats than was seen. An error may come long after its request was counted.
func (c *claim) count() bool {
	requests, failure := c.stats.Requests(), c.stats.LastError()
	if requests == c.requests && failure == c.failure {
		return false
	}
	c.requests, c.failure = requests, failure
	return true
}

// newClaim reads an order. Its error is for the laptop.
func newClaim(o *api.ClaimOrder, by *owner, from taker, now time.Time) (*claim, error) {
	if o.ID == "" || len(o.ID) > maxID {
		return nil, api.Errorf(api.ExitUsage, "a claim's ID has 1 to %d bytes", maxID)
	}
	if len(o.Ports) == 0 || len(o.Ports) > maxPorts {
		return nil, api.Errorf(api.ExitUsage, "a claim has 1 to %d ports", maxPorts)
	}
	seen := make(map[port]bool, len(o.Ports))
	for _, p := range o.Ports {
		switch {
		case p.Protocol != "tcp" && p.Protocol != "udp", p.Port == 0:
			return nil, api.Errorf(api.ExitUsage, "%s/%d is no port", p.Protocol, p.Port)
		case seen[portOf(p)]:
			return nil, api.Errorf(api.ExitUsage, "%s is claimed twice", describePort(portOf(p)))
		case p.Listen == p.Port:
			return nil, api.Errorf(api.ExitUsage, "%s cannot be listened on for the application, which does", describePort(portOf(p)))
		}
		seen[portOf(p)] = true
	}
	spec := match.Spec{Path: o.Match.Path, Methods: o.Match.Methods}
	for _, h := range o.Match.Headers {
		spec.Headers = append(spec.Headers, match.Header(h))
	}
	m, err := match.New(spec)
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "the match: %w", err)
	}
	c := &claim{
		id: o.ID, owner: by, by: from, laptop: from, match: m, mirror: o.Mirror, ports: slices.Clone(o.Ports), since: now, stats: new(interceptor.Stats),
	}
	if o.Clone != nil {
		if len(o.Clone.Addresses) > maxClonePods {
			return nil, api.Errorf(api.ExitUsage, "a clone has at most %d pods", maxClonePods)
		}
		c.laptop = newClone(from, o.Clone.Addresses)
	}
	if o.TLS != nil {
		pair, err := tls.X509KeyPair(o.TLS.Certificate, o.TLS.Key)
		if err != nil {
			return nil, api.Errorf(api.ExitUsage, "the application's certificate: %w", err)
		}
		c.tls = &tls.Config{Certificates: []tls.Certificate{pair}}
	}
	return c, nil
}

// excludes are the ports of c that somebody else's claim has for requests that c may mean as well. A mirror excludes nobody.
func (c *claim) excludes(other *claim) []port {
	if c.mirror || other.mirror || match.Disjoint(c.match, other.match) {
		return nil
	}
	var both []port
	for _, p := range c.ports {
		if slices.ContainsFunc(other.ports, func(o api.AgentPort) bool { return portOf(o) == portOf(p) }) {
			both = append(both, portOf(p))
		}
	}
	return both
}

// conflict tells who has what c asks for: api.ExitConflict.
func conflict(c, other *claim, both []port) *api.Error {
	who := "another laptop"
	if other.owner.name != "" {
		who = other.owner.name
	}
	return api.Errorf(api.ExitConflict, "%s has %s of %s since %s", who, other.match, describePorts(both), describeTime(other.since, c.since)).
		WithHint("choose requests that are not among these (--headers), or ask %s to leave", who)
}

// describeTime gives a time as people say it now. A pod's clock has no time zone of its own, and the reader's is another.
func describeTime(t, now time.Time) string {
	layout := "15:04 MST"
	if now.Sub(t) > 12*time.Hour {
		layout = "2 January, 15:04 MST"
	}
	return t.UTC().Format(layout)
}

func describePort(p port) string {
	if p.Protocol == "udp" {
		return fmt.Sprintf("UDP port %d", p.Port)
	}
	return fmt.Sprintf("port %d", p.Port)
}

func describePorts(ports []port) string {
	if len(ports) == 1 {
		return describePort(ports[0])
	}
	words := make([]string, len(ports))
	for i, p := range ports {
		words[i] = strconv.Itoa(int(p.Port))
		if p.Protocol == "udp" {
			words[i] += "/udp"
		}
	}
	last := len(words) - 1
	return "ports " + strings.Join(words[:last], ", ") + " and " + words[last]
}

// table is what the interceptor asks: who may get requests of a port, in the order in which they are judged.
type table map[port][]interceptor.Claim

func newTable(claims []*claim) table {
	claims = slices.Clone(claims)
	slices.SortStableFunc(claims, func(a, b *claim) int { return cmp.Compare(a.since.UnixNano(), b.since.UnixNano()) })
	t := make(table)
	for _, c := range claims {
		for _, p := range c.ports {
			t[portOf(p)] = append(t[portOf(p)], interceptor.Claim{
				ID: c.owner.hash + "/" + c.id, Match: c.match, Mirror: c.mirror, Taker: c.laptop, Stats: c.stats, TLS: c.tls,
			})
		}
	}
	return t
}

// describe is the claim as laptops are told of it.
func (c *claim) describe(to *owner, notes map[port][]string) api.Claim {
	d := api.Claim{
		ID: c.id, Owner: c.owner.name, Mine: c.owner == to, Away: c.laptop.Away(), Match: c.match.String(), Mirror: c.mirror,
		Ports: c.ports, Since: c.since, Requests: c.stats.Requests(),
	}
	if f := c.stats.LastError(); f != nil {
		d.LastError = f.Error
	}
	for _, p := range c.ports {
		for _, note := range notes[portOf(p)] {
			if !slices.Contains(d.Notes, note) {
				d.Notes = append(d.Notes, note)
			}
		}
	}
	return d
}
