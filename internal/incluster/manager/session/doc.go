// Package session serves the sessions of laptops.
//
//	Server ─ for each session ─▶ session ─┬─ control: ClientHello ─▶ authenticate ─▶ lease ─▶ Hello, then changes
//	   ▲                                  ├─ ticket ──▶ ProxyPort, which adds conns to the session
//	   │                                  ├─ TCP, UDP, echo ─▶ package dial
//	transport.Server                      └─ IP ─────────────▶ package router
//	   ▲
//	   └─ conns: loopback (port-forward), ProxyPort (api-proxy, direct)
//
// What changes comes from package watch. The authentication asks the API server who uses the laptop; package access
// then limits the flows of that user.
package session
