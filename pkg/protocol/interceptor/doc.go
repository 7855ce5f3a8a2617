// Package interceptor forwards the connections of a pod's ports. Each HTTP request, and each connection or UDP flow
// that is not HTTP, goes to the target of the claim that matches it, or else to the application. It is the data plane
// of the traffic agent, and knows nothing of Kubernetes, redirects or sessions.
//
//	              ┌─ probe ───────────▶ answered with itself
//	              ├─ HTTP/1, HTTP/2 ──▶ net/http's server ─ each request: judge ─┬─▶ target of a claim
//	conn ─ sniff ─┤                          ▲                                   └─▶ application
//	              ├─ TLS ── a claim has the key? ── no ─┐                   (copies to mirror claims)
//	              ├─ other bytes ───────────────────────┼──▶ whole: bytes, FIN and RST as they are
//	              └─ silence: the server speaks first? ─┘
//
// # The order of claims
//
// The kubelet's probes go to the application: a pod whose requests are all on a laptop is as healthy as before. Every
// other request goes to the first claim that matches it and whose owner is not away. Claims that mirror get a copy, and
// the search goes on. A request that matches no claim goes to the application. The Interceptor reads the claims for
// each request of a connection.
//
// A connection that is not HTTP goes, whole, to the first claim that matches everything. TLS that the application
// terminates is such a connection, unless a claim brings the application's key.
//
// # What stays as it is
//
// Each client connection has connections of its own to the application and to each target, which carry no other
// client's requests. So the application sees as many connections as without the agent, and each may have its client's
// address. When the application closes its connection, or says Connection: close, the client's ends as well. A FIN of
// the client in the middle of a request becomes a FIN, a RST becomes a RST. An answer that breaks off breaks off at the
// client, too. If the application refuses the connection, the client's is reset. Paths, queries and header values pass
// unchanged. This package does not keep the case and order of HTTP/1 header names, and replaces hop-by-hop headers.
//
// This package forwards HTTP/1 itself: net/http's client has two goroutines for each connection, and waking them is
// most of the cost that a proxy adds to a request. net/http parses the head of a request, and this package writes its
// own, so that both ends read the same length and end for any input (no request smuggling). HTTP/2 is net/http on
// both sides. This package drops the offer of HTTP/1.1 to change to HTTP/2 (Upgrade: h2c): the client continues in
// HTTP/1.1, as RFC 9113 demands.
//
// # A target that fails
//
// If a target cannot be reached, or breaks off before it answers, the client gets HTTP 502 with a text that says why; a
// connection that is not HTTP is reset. But if the target's owner turns out to be away, everything that can be sent
// once more without harm goes to the application.
package interceptor
