package dns

import (
	"context"
	"net"
	"net/netip"

	"github.com/miekg/dns"
)

// Handler answers DNS queries. A [Resolver] implements it, and asks one Handler per zone and one for other names.
// [Nameservers] implements it by asking servers.
//
// ServeDNS must be safe for concurrent use and must not change q. It returns an error if it has no answer, which
// the server turns into SERVFAIL; a negative answer is a message, not an error. The answer has q's ID and is not
// truncated. It may be shared, so callers must not change it.
type Handler interface {
	ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error)
}

// DialFunc connects to a nameserver; network is "udp" or "tcp". With "udp", each Read of the connection returns one
// datagram from addr only, and each Write sends one. Close must unblock Read. Write must observe its deadline, or be
// unblocked by Close. It should fail at once if addr is known to be unreachable, so that queries fail quickly too.
type DialFunc func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)

func dialDirectly(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, addr.String())
}
