//go:build linux

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
	"kubevpn/pkg/host/redirect"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/protocol/interceptor"
)

// Bounds of orders, far beyond normal use.
const (
	maxID         = 128 // bytes
	maxPorts      = 64  // of a claim
	maxOwnClaims  = 64  // of an owner
	maxOwners     = 256
	maxClonePods  = 1024
	maxNoteBytes  = 256
	maxPortsNotes = 8 // of a port
)

// port is a port of the pod at which requests arrive.
type port = redirect.Port

func portOf(p api.AgentPort) port { return port{Protocol: p.Protocol, Port: p.Port} }

// claim is one intercept in this pod. Only the last group of fields changes; leader.mu guards it.
type claim struct {
	id      string
	owner   *owner
	by      laptop             // of the session that ordered it
	target  interceptor.Target // receives the requests: by, or a clone
	match   *httpmatch.Match
	mirror  bool
	observe bool // the laptop gets no copies
	noStore bool // no cache may keep answers
	ports   []api.AgentPort
	since   time.Time // by this agent's clock
	tls     *tls.Config
	stats   *interceptor.Stats
	record  *recorder

	awaySince time.Time // when by was first seen away; zero: it is not away
	requests  uint64    // seen so far
	failure   *interceptor.Failure
}

// count reports whether the claim's stats changed since the last call. An error may follow long after its request.
func (c *claim) count() bool {
	requests, failure := c.stats.Requests(), c.stats.LastError()
	if requests == c.requests && failure == c.failure {
		return false
	}
	c.requests, c.failure = requests, failure
	return true
}

// newClaim checks an order. Its error is for the laptop.
func newClaim(o *api.ClaimOrder, by *owner, from laptop, now time.Time) (*claim, error) {
	if o.ID == "" || len(o.ID) > maxID {
		return nil, api.Errorf(api.ExitUsage, "an intercept's ID has 1 to %d bytes", maxID)
	}
	if len(o.Ports) == 0 || len(o.Ports) > maxPorts {
		return nil, api.Errorf(api.ExitUsage, "an intercept has 1 to %d ports", maxPorts)
	}
	seen := make(map[port]bool, len(o.Ports))
	for _, p := range o.Ports {
		switch {
		case p.Protocol != "tcp" && p.Protocol != "udp", p.Port == 0:
			return nil, api.Errorf(api.ExitUsage, "%s/%d is not a port", p.Protocol, p.Port)
		case seen[portOf(p)]:
			return nil, api.Errorf(api.ExitUsage, "%s is named twice", describePort(portOf(p)))
		case p.Listen == p.Port:
			return nil, api.Errorf(api.ExitUsage, "the sidecar cannot listen on %s: the application does",
				describePort(portOf(p)))
		}
		seen[portOf(p)] = true
	}
	m, err := httpmatch.New(o.Match)
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "the match: %w", err)
	}
	c := &claim{
		id: o.ID, owner: by, by: from, target: from, match: m, mirror: o.Mirror,
		observe: o.Mirror && o.Observe, noStore: !o.Cache, ports: slices.Clone(o.Ports),
		since: now, stats: new(interceptor.Stats), record: new(recorder),
	}
	if o.Clone != nil {
		if len(o.Clone.Addresses) > maxClonePods {
			return nil, api.Errorf(api.ExitUsage, "a clone has at most %d pods", maxClonePods)
		}
		c.target = newClone(from, o.Clone.Addresses)
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

// at returns the ports of the claim.
func (c *claim) at() (ports []port) {
	for _, p := range c.ports {
		ports = append(ports, portOf(p))
	}
	return ports
}

// overlaps returns the ports on which one request could match both claims. A mirror overlaps with no claim.
func (c *claim) overlaps(other *claim) []port {
	if c.mirror || other.mirror || httpmatch.Disjoint(c.match, other.match) {
		return nil
	}
	theirs := other.at()
	return slices.DeleteFunc(c.at(), func(p port) bool { return !slices.Contains(theirs, p) })
}

// conflict returns the error for an overlap of c with another owner's claim.
func conflict(c, other *claim, both []port) *api.Error {
	who := cmp.Or(other.owner.name, "another laptop")
	return api.Errorf(api.ExitConflict, "%s has intercepted %s on %s since %s", who, other.match, describePorts(both),
		describeTime(other.since, c.since)).
		WithHint("Choose other requests, such as with --headers or --baggage, or ask %s to run `kubevpn leave`.", who)
}

// describeTime formats a time for people. It is in UTC, because the agent does not know the reader's time zone.
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
	words := api.Texts(ports, func(p port) string {
		if p.Protocol == "udp" {
			return fmt.Sprintf("%d/udp", p.Port)
		}
		return strconv.Itoa(int(p.Port))
	})
	last := len(words) - 1
	return "ports " + strings.Join(words[:last], ", ") + " and " + words[last]
}

// table holds the claims of each port in their order, for the interceptor.
type table map[port][]interceptor.Claim

func newTable(claims []*claim) table {
	t := make(table)
	byAge := func(a, b *claim) int { return a.since.Compare(b.since) }
	for _, c := range slices.SortedStableFunc(slices.Values(claims), byAge) {
		for _, p := range c.at() {
			t[p] = append(t[p], interceptor.Claim{
				ID: c.globalID(), Match: c.match, Mirror: c.mirror, Observe: c.observe, NoStore: c.noStore,
				Target: c.target, Stats: c.stats, Record: c.record.begin, TLS: c.tls,
			})
		}
	}
	return t
}

// globalID returns an ID that no claim of another owner has.
func (c *claim) globalID() string { return c.owner.hash + "/" + c.id }

// describe returns the report of the claim to a laptop.
func (c *claim) describe(to *owner, notes map[port][]string) api.Claim {
	d := api.Claim{
		ID: c.id, Owner: c.owner.name, Mine: c.owner == to, Away: c.target.Away(), Match: c.match.String(),
		Mirror: c.mirror,
		Ports:  c.ports, Since: c.since, Requests: c.stats.Requests(),
	}
	if f := c.stats.LastError(); f != nil {
		d.LastError = f.Error
	}
	for _, p := range c.at() {
		for _, note := range notes[p] {
			if !slices.Contains(d.Notes, note) {
				d.Notes = append(d.Notes, note)
			}
		}
	}
	return d
}
