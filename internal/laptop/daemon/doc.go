// Package daemon keeps this user's connections and intercepts while no command runs. The CLI starts the daemon on
// demand, detached from its terminal. Each user has at most one. It runs as that user, and ends after a minute without
// connections.
//
//	CLI ──HTTP+JSON── daemon.sock ─▶ server ─┬▶ connections ─▶ Connection (internal/laptop/connection)
//	                                         └▶ intercepts on them ─▶ Intercept (internal/laptop/intercept)
//	CLI ──SCM_RIGHTS─ helper.sock ─▶ handover ─▶ hostNetwork ─▶ Helper (root): TUN, routes, resolver
//
// Connections and intercepts are tasks of a registry (registry.go), which starts, joins, pins and ends them. An
// intercept needs a connection: a request for an intercept makes the connection first, and the intercepts on a
// connection end before it. A Factory (factory.go, wire.go) makes both.
//
// The caller of a method whose name ends in Locked holds the mutex of the value, or of the owner of its part.
//
// All connections share hostNetwork (network.go): one network state, one resolver, one helper. A connection sees its
// part of it as a connection.Network.
//
// Hold (hold.go) runs one connection in the same way in the process of a command: for this machine, for a
// sandbox.Place, a network namespace that another process holds (place.go), or for programs that use a proxy
// (socks.go). Only the Helper differs.
package daemon
