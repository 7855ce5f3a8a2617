package dns

import "sync/atomic"

// Stats are the counters of a Resolver since New. All but InFlight only grow.
type Stats struct {
	UDP       uint64 // messages received over UDP
	TCP       uint64 // messages received over TCP
	Cluster   uint64 // queries that went to a cluster
	Short     uint64 // of these, by a short name
	Shared    uint64 // questions to clusters that shared the exchange of an identical one
	Upstream  uint64 // queries that went to the upstream nameservers
	Failed    uint64 // queries answered SERVFAIL because no server answered
	Truncated uint64 // UDP replies cut to the client's size
	Malformed uint64 // messages answered FORMERR or NOTIMP
	Dropped   uint64 // messages that were not queries
	Overload  uint64 // queries answered SERVFAIL because too many were in flight
	Loops     uint64 // the Resolver's own queries that came back from an upstream
	InFlight  int64  // queries being answered now
}

type counters struct {
	udp, tcp, cluster, short, shared, upstream             atomic.Uint64
	failed, truncated, malformed, dropped, overload, loops atomic.Uint64
	clusterInFlight, upstreamInFlight                      atomic.Int64
}

func (c *counters) stats() Stats {
	return Stats{
		UDP:       c.udp.Load(),
		TCP:       c.tcp.Load(),
		Cluster:   c.cluster.Load(),
		Short:     c.short.Load(),
		Shared:    c.shared.Load(),
		Upstream:  c.upstream.Load(),
		Failed:    c.failed.Load(),
		Truncated: c.truncated.Load(),
		Malformed: c.malformed.Load(),
		Dropped:   c.dropped.Load(),
		Overload:  c.overload.Load(),
		Loops:     c.loops.Load(),
		InFlight:  c.clusterInFlight.Load() + c.upstreamInFlight.Load(),
	}
}
