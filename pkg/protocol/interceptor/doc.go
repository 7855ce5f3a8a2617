// Package interceptor forwards the connections of a pod's ports. Each HTTP request, and each connection or UDP flow
// that is not HTTP, goes to the target of the claim that matches it, or else to the application. It is the data plane
// of the traffic agent, and knows nothing of Kubernetes, redirects or sessions.
//
//	              ┌─ probe ───────────▶ answered with itself
//	              ├─ HTTP/1, HTTP/2 ──▶ each request: judge ─┬─▶ target of a claim
//	conn ─ sniff ─┤                          ▲               └─▶ application
//	              ├─ TLS ── a claim has the key? ── no ─┐                   (copies to mirror claims)
//	              ├─ other bytes ───────────────────────┼──▶ whole: bytes, FIN and RST as they are
//	              └─ silence: the server speaks first? ─┘
//
// # The order of claims
//
// The kubelet's probes go to the application: a pod whose requests are all on a laptop is as healthy as before. A
// request is one by its User-Agent or, where the pod's spec sets another, if it comes from the pod's node and has the
// path and headers of the spec (check.go). A connection is one if it comes from the node to a port that the spec
// names, and names no server in its ClientHello, or closes without a byte. So a connection from elsewhere through the
// node can look like one only if it does not say more. Every other request goes to the first claim that matches it and
// whose owner is not away. Claims that mirror get a copy, and the search goes on. A request that matches no claim goes
// to the application. The Interceptor reads the claims for each request of a connection.
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
// client, too. If the application refuses the connection, the client's is reset.
//
// Messages of HTTP/1 cross byte for byte, heads and chunks included, to the application and to targets. This package
// reads from a head what it needs to match the request, and where the message ends (head.go); names and values may have
// any characters. It rejects a request, with 400 and the end of the connection, only if the application could see
// another end of it than this package does, because then another request could begin there, unmatched: contradictory or
// malformed lengths, NUL or a bare CR in the head, malformed chunks (RFC 9112, 11.2). An answer that does not say where
// it ends ends with its connection. Three lines are exceptions: X-Forwarded-For, if Config asks for it; Connection:
// close, when the agent ends, or an answer precedes the body of a request that expects 100 (Continue); and the offer of
// HTTP/1.1 to change to HTTP/2 (Upgrade: h2c), which this package drops: the client continues in HTTP/1.1, as RFC 9113
// demands, and its requests can be matched.
//
// HTTP/2 is net/http on both sides, with the limits of the application: a client of HTTP/2 learns how many streams, and
// which windows, frames and heads the application allows, as the connection to it begins with the client's. Paths,
// queries, names and values pass unchanged; this package replaces hop-by-hop headers.
//
// # A target that fails
//
// If a target cannot be reached, or breaks off before it answers, the client gets HTTP 502 with a text that says why; a
// connection that is not HTTP is reset. But if the target's owner turns out to be away, everything that can be sent
// once more without harm goes to the application.
package interceptor
