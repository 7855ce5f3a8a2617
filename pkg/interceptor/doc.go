// Package interceptor passes the connections of a pod's ports on: each HTTP request, and each connection or UDP flow that is
// not HTTP, goes to who claims it, or else to the application that it was for. It is the data plane of the traffic agent, and
// knows nothing of Kubernetes, redirects or sessions.
//
//	              ┌─ canary ──────────▶ answered with itself
//	              ├─ HTTP/1, HTTP/2 ──▶ net/http's server ─ each request: judge ─┬─▶ taker (a claim's)
//	conn ─ sniff ─┤                          ▲                                   └─▶ application
//	              ├─ TLS ── a claim has the key? ── no ─┐                   (copies to mirror claims)
//	              ├─ other bytes ───────────────────────┼──▶ whole: bytes, FIN and RST as they are
//	              └─ silence: the server speaks first? ─┘
//
// # The order of judgement
//
// The kubelet's probes go to the application: a pod whose requests are all on a laptop is as healthy as before. Then the
// first claim that takes the request and whose owner is not away has it. Claims that mirror get a copy and judgement goes on.
// What nobody takes goes to the application. Claims are looked at anew for each request of a connection.
//
// A connection that is not HTTP goes, whole, to the first claim that takes everything. TLS which the application ends itself
// is such a connection, unless a claim brings the application's key.
//
// # What is kept as it is
//
// Each client connection has connections of its own to the application and to each taker, which no other client's requests
// go over. So the application sees as many connections as without us, and each may have its client's address. When the
// application closes its connection, or says Connection: close, the client's ends as well. A FIN of the client in the middle
// of a request becomes a FIN, a RST becomes a RST. An answer that breaks off breaks off at the client, too. What reaches
// neither, as the application refuses connections, resets the client's. Paths, queries and header values pass untouched; the
// case and order of HTTP/1 header names are lost, and hop-by-hop headers are ours.
//
// HTTP/1 is passed on by an exchange of our own: net/http's client has two goroutines for each connection, and waking them
// is most of what a proxy adds to a request. The head of a request is parsed by net/http and written anew, so that there is
// one reading of its length and its end, whatever the client wrote (no request smuggling). HTTP/2 is net/http on both sides.
// The offer of HTTP/1.1 to change to HTTP/2 (Upgrade: h2c) is not passed on: who made it goes on in HTTP/1.1, as RFC 9113 has it.
//
// # A taker that fails
//
// A taker that cannot be reached, or breaks off before it answers, is HTTP 502 with a text that says why; a connection that
// is not HTTP is reset. But a taker whose owner is away by then was just not noticed in time: what can be passed on once more
// without harm goes to the application.
package interceptor
