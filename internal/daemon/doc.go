// Package daemon keeps this user's connections while no command runs. The CLI starts it on demand, detached;
// there is one per user, it runs as that user, and it ends by itself after a minute without connections.
//
//	CLI ──HTTP+JSON── daemon.sock ─▶ server ─┬▶ set of connections ─▶ Connection (internal/session)
//	                                         └▶ intercepts on them ─▶ Intercept (internal/intercept)
//	CLI ──SCM_RIGHTS─ helper.sock ─▶ handover ─▶ machine ─▶ Helper (root): TUN, routes, resolver
//
// What is each connection's own, the session, is behind the Connection interface. What all of them share is
// the machine (network.go): one network state, one resolver, one helper. A connection sees it as a Network.
//
//	            POST /v1/connect                      Run returns an error
//	(absent) ───────────────────▶ connecting ───────────────────────────────▶ (absent), the error is the answer
//	                                  │ Connected()
//	                                  ▼              Run returns an error, or the helper ended
//	                              connected ────────────────────────────────▶ failed ── connect, disconnect ─▶ (absent)
//	                                  │ POST /v1/disconnect
//	                                  ▼
//	                            disconnecting ── Run has returned, its links are removed ─▶ (absent)
//
// On connections there are intercepts (intercepts.go): workloads whose requests come to this laptop. A request for one makes
// the connection first, and a connection's intercepts end before it does. What a request began and nobody has retained ends
// with the request (task.go), so that Ctrl-C leaves nothing.
//
// Foreground runs one connection with the same machine and no daemon. Isolated runs one where a Place, a network namespace
// that another process holds, is in the machine's stead.
package daemon
