package connection

import (
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/packetlink"
)

// Counters is a snapshot of what a connection counts.
type Counters struct {
	Streams  int            // open in the session
	Netstack netstack.Stats // zero without a device
	// Dropped counts packets by reason, besides those of Netstack.
	Dropped map[string]uint64
	// DNSCache, Hosts and PacketQueue are bounded: answers of cluster DNS, routed hosts, and bytes that wait for packet
	// streams.
	DNSCache, Hosts, PacketQueue netstack.Use
}

// Counters returns a snapshot.
func (c *Connection) Counters() Counters {
	var out Counters
	if ts := c.current.now(); ts != nil {
		out.Streams = ts.Stats().Streams
	}
	if stack := c.routes.stack.Load(); stack != nil {
		out.Netstack = stack.Stats()
	}
	out.Dropped = c.packets.dropped()
	queued := c.packets.sender.Stats().Queued
	out.PacketQueue = netstack.Use{Used: int64(queued), Limit: packetlink.Streams * packetlink.DefaultLimit}
	cached, limit := c.routes.zone.cache.Len()
	out.DNSCache = netstack.Use{Used: int64(cached), Limit: int64(limit)}
	out.Hosts = netstack.Use{Used: int64(len(c.hosts.shown())), Limit: maxHosts}
	return out
}
