// Package connect implements the commands of the help's group Connections:
//
//	connect     connect.go ─▶ log in (command) ─▶ ask for consent ─▶ the daemon holds the connection
//	            socks.go      --socks: this process holds it, and serves a proxy
//	run         run.go        a program of this machine in a sandbox, or with that proxy
//	disconnect  disconnect.go
//	status      status.go     the table of connections, and the details below it
//	            status_intercepts.go   the table of intercepts
//	quit        quit.go
//	trust       trust.go      the stored answers to questions
package connect
