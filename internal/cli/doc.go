// Package cli is the kubevpn command: it parses, asks the daemon (or, for install and --foreground, does it in
// this process), and prints. Results go to stdout, what happens on the way to stderr, and the exit code is the
// error's (internal/api). One file per command; each has its options, the command that fills them, and run:
//
//	connect     connect.go ─▶ ask.go ─▶ launch.go: a daemon, started if need be ─▶ client.go: POST /v1/connect
//	                                     └─ the daemon has no helper: sudo, then its socket is handed over
//	proxy       proxy.go, spec.go ─▶ the same: POST /v1/intercept, whose body stays open until it is done or let go of
//	leave, disconnect, status, quit, logs, version, completion
//	install, uninstall, reset        the cluster's part, with the user's own credentials
//	daemon, helper, exec-credential  hidden; kubevpn runs itself with them
//
// The package knows neither the daemon's nor the helper's code: cmd/kubevpn injects them as Programs.
package cli
