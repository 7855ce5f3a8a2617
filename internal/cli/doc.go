// Package cli implements the kubevpn command. It parses the command line, sends a request to the daemon, and prints the
// result. install, uninstall, reset and connect --foreground work in this process. Results go to stdout and progress to
// stderr. The exit code is that of the error (internal/api). Each command has a file with its options, a function that
// creates the cobra command, and a run method:
//
//	connect     connect.go ─▶ login.go: run the credential plugin, check that the API server answers
//	                       ─▶ trust.go ─▶ ask.go ─▶ launch.go: start the daemon if none runs ─▶ client.go: POST /v1/connect
//	                                                 └─ the daemon has no helper: start one with sudo, hand over its socket
//	                          └─ the cluster needs consent: ask the user, send the request again
//	proxy       proxy.go, spec.go ─▶ the same with POST /v1/intercept; an open body holds the intercepts
//	leave, disconnect, status, trust, quit, logs, version, completion
//	install, uninstall, reset        change the cluster with the user's own credentials
//	daemon, helper                   hidden: the other processes of kubevpn
//
// The package does not import the daemon or the helper: cmd/kubevpn injects them as Programs.
package cli
