// Package dns is the laptop's DNS resolver. One [Resolver] per daemon process answers the names of every
// connected cluster by asking that cluster's DNS through its tunnel, and passes every other query on to the
// nameservers that answered before kubevpn came, message bytes unchanged.
//
// Queries reach it on loopback (an nftables redirect of port 53, or an edited resolv.conf, made by pkg/host/osdns)
// or on an address inside the tunnel (systemd-resolved's per-link servers). Both are plain net.PacketConn and
// net.Listener for [Resolver.Serve].
//
//	UDP/TCP query
//	     │
//	parse header and question (wire.go)
//	     ├─ not a query, shorter than a header ───────────────▶ dropped
//	     ├─ opcode other than QUERY ──────────────────────────▶ NOTIMP
//	     ├─ not exactly one whole question ───────────────────▶ FORMERR
//	     ▼
//	route (route.go): a pure function of the name, the zones and their indexes
//	     ├─ under a domain of a cluster ─────┐
//	     ├─ reverse name inside its prefixes ┤
//	     ├─ short name that its index knows ─┤
//	     │                                   ▼
//	     │                    ask cluster DNS through the tunnel (cluster.go), unless the answer is
//	     │                    cached (cache.go): UDP, TCP when truncated,
//	     │                    next server on silence; a CNAME that leaves the cluster is followed here
//	     │                                   ├─ answer ───────▶ CNAME to the full name + records, cut to the
//	     │                                   │                  client's UDP size with TC, whole over TCP
//	     │                                   └─ no answer ────▶ SERVFAIL, with the reason as extended error
//	     └─ everything else
//	                └─▶ forward the message's bytes to the upstream nameservers (nameservers.go):
//	                    next one on silence or SERVFAIL; the reply's bytes go back unchanged
//
// # Which name goes where
//
// With one connection whose domain is cluster.local and whose namespace is "default":
//
//	name                                  goes to   as
//	web.default.svc.cluster.local         cluster   itself; so does everything else under cluster.local
//	db.corp.test                          cluster   itself, if corp.test is an extra domain of the zone
//	db.vpn.corp.test                      upstream  if the zone excludes vpn.corp.test; so does every other form
//	web                                   cluster   web.default.svc.cluster.local, if that Service exists
//	web.billing                           cluster   web.billing.svc.cluster.local, if that Service exists
//	db-0.db, db-0.db.billing              cluster   a pod of Service db in default (or billing), if db exists
//	_http._tcp.web[.billing]              cluster   the Service's SRV records, if web exists
//	web.billing.svc, db-0.db.billing.svc  cluster   always: no outside name ends in .svc
//	10-1-2-3.billing.pod                  cluster   always, when the first label is an IP address with dashes
//	4.3.2.10.in-addr.arpa                 cluster   if 10.2.3.4 is inside the zone's prefixes, else upstream
//	web.dev, www.google.com               upstream  even with a Service web in a namespace dev: "dev" is a
//	                                                public top-level domain; write web.dev.svc
//	git.corp, vault.internal              upstream  then, after NXDOMAIN, the cluster, if a Service git exists in a
//	                                                namespace corp: networks use these top-level domains
//	git.corp.svc                          cluster   git.corp.svc.cluster.local
//	localhost, wpad, isatap, x.local      upstream  never a Service
//	anything else                         upstream  the message unchanged; also other classes (CHAOS)
//
// Short names are expanded like a pod's search list does, [NAMESPACE.svc.DOMAIN, svc.DOMAIN, DOMAIN], but only
// to names whose Service is in the zone's index, so nothing else enters the tunnel. If several expansions are
// possible (db-0.db: a pod of db, or Service db-0 in namespace db), the resolver asks for them in that order and
// continues after NXDOMAIN. The answer to a short name begins with a CNAME to the full name.
//
// # Several clusters
//
// The order of the zones given to [Resolver.SetZones] decides: the first zone whose index knows the Service
// answers; if none does, the first with the cluster domain. One query is asked of one cluster, so that the same
// query gets the same answer.
//
// # Promises, and where they end
//
// A query for a name outside of the cluster never enters a tunnel, and a query for a name of the cluster never leaves
// it. While the tunnel is down, the latter fails with SERVFAIL, never with NXDOMAIN or silence. There are exceptions:
//
//   - A zone without an index (the traffic manager may not watch Services) cannot tell a Service from a host on
//     the local network. Each single-label name is first asked of the cluster as NAME.NAMESPACE.svc.DOMAIN and
//     goes upstream on NXDOMAIN: local single-label names are then seen by cluster DNS, and while the tunnel is
//     down they get SERVFAIL, as they might be Services. Names with two labels go upstream.
//   - The index learns of a Service a moment after its creation. A short name asked in between goes upstream; the
//     full name and the .svc form never do.
//   - A program's own search list is its own affair: with "search corp.example" and "ndots:5" it asks for
//     web.default.svc.cluster.local.corp.example first, which is not a cluster's name.
//   - glibc and Go pass a SERVFAIL on at once; musl asks again and gives up after its five seconds.
//   - The redirect does not tell which nameserver of resolv.conf a query was sent to: all go to the first one
//     that works.
//   - Operations other than QUERY (UPDATE, NOTIFY) are not forwarded.
//   - The extended DNS options (cookies, client subnet) of a query for a cluster name are not passed on.
//
// A [Cache] per connection keeps the cluster's answers for their TTL, until the traffic manager says that the Service
// has changed. It has answers of one cluster only. Nothing from upstream is cached: the operating system's own
// resolvers do that. Identical questions to the same cluster that are in flight at the same time share one exchange.
package dns
