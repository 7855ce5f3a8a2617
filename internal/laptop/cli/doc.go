// Package cli implements the kubevpn command. It parses the command line, sends a request to the daemon, and prints the
// result. install, uninstall, reset, connect --foreground, env, and dev with --isolate or --docker work in this
// process. Results go to stdout and progress to stderr. The error determines the exit code (internal/api). Each command
// has a file with its options, a function that creates the cobra command, and a run method:
//
//	connect     connect.go ─▶ login.go: run the credential plugin, check that the API server answers
//	                       ─▶ consent.go ─▶ ask.go ─▶ launch.go: start the daemon unless one runs ─▶ client.go: POST
//	                                                 └─ the daemon has no helper: start one with sudo, pass its socket
//	                          └─ the cluster needs consent: ask the user, send the request again
//	proxy       proxy.go, spec.go ─▶ the same with /v1/intercept; the intercepts end with the body of the request
//	clone       clone.go ─▶ the same with a clone as the target
//	dev         dev.go, dev_docker.go ─▶ the same, and internal/laptop/dev runs the program while the request lives
//	env         env.go ─▶ internal/kube/podenv
//	leave, disconnect, status, trust, quit, logs, version, completion
//	install, uninstall, reset        change the cluster with the user's own credentials
//	daemon, helper                   hidden: the other processes of kubevpn
//
// The package does not import the daemon or the helper: cmd/kubevpn injects them as Programs.
package cli
