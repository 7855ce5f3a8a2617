// Package daemonclient sends the requests of a command to the daemon of this user. It starts the daemon and the root
// helper if a request needs them:
//
//	client.go   Client: a method for each request, JSON over HTTP over a unix socket; errors
//	connect.go  requests that need a connection: start the daemon and the helper ─▶ POST ─▶ events
//	start.go    start the daemon unless one of this version runs, and stop it; start the root helper, and send its
//	            socket to the daemon
package daemonclient
