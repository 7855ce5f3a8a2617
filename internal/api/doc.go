// Package api holds the words that the parts of kubevpn say to each other, and nothing that acts on them:
//
//	CLI ──ConnectRequest, Event, Status──▶ daemon          HTTP+JSON over a unix socket   (daemon.go)
//	daemon ──NetworkState, NetworkApplied──▶ helper (root)  JSON packets over a socketpair (network.go)
//	session ──ClientHello, ControlMessage──▶ traffic manager  JSON lines on a mux stream   (manager.go)
//	session ──TicketRequest, Ticket──▶ traffic manager      one JSON line each on a mux stream   (ticket.go)
//
// and the one error type that crosses all of them with its exit code and its next step (error.go).
// It imports nothing of ours, so every part may import it.
package api
