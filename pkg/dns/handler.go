package dns

import (
	"context"
	"net"
	"net/netip"

	"github.com/miekg/dns"
)

// Handler answers DNS queries. It is the seam between the links of the chain: a [Resolver] is one as a whole,
// and asks a Handler per zone and one for everything else; [Nameservers] is the one that asks real servers.
//
// ServeDNS must be safe for concurrent use and must not change q. An error means that no answer could be had
// (whoever writes to a client turns it into SERVFAIL); a negative answer is a message, not an error.
// The answer has q's ID, is not truncated, may be shared between callers and must not be changed by them.
type Handler interface {
	ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error)
	Name() string // for logs: "upstream", a connection's ID
}

// DialFunc connects to a nameserver; network is "udp" or "tcp". With "udp", each Read of the connection gives
// one datagram from addr and from nobody else, each Write sends one. Close must unblock Read and Write:
// deadlines are not used. Where the way to addr is known to be down it should fail at once, so that
// queries fail quickly too.
type DialFunc func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)

func dialDirectly(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, addr.String())
}
