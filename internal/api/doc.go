// Package api defines the messages between the parts of kubevpn:
//
//	CLI ──ConnectRequest, Event, Status──▶ daemon          HTTP+JSON over a unix socket   (daemon.go)
//	daemon ──NetworkState, NetworkApplied──▶ helper (root)  JSON frames over a socketpair (network.go)
//	session ──ClientHello, ControlMessage──▶ traffic manager  JSON lines on a mux stream   (manager.go)
//	session ──TicketRequest, Ticket──▶ traffic manager      one JSON line each on a mux stream   (ticket.go)
//
// It also defines the error type that all of them share, with an exit code and a hint (error.go). The package imports
// no other package of internal.
package api
