// Package cli implements the kubevpn command. It parses the command line, sends a request to the daemon, and prints the
// result. Results go to stdout and progress to stderr. The error determines the exit code (internal/api). A command is
// a file in the folder of its group, with its options, a function that creates the cobra command, and a run method. The
// groups do not import each other:
//
//	main.go ─▶ root.go: the groups ─▶ connect    connect, run, disconnect, status, quit, trust
//	           usage.go: the help     workload   proxy, clone, dev, env, list, requests, diff, leave, reset
//	                                  inspect    doctor, why, flows, dns, ui, logs, report
//	                                  admin      install, uninstall, config, service, version, completion, hidden
//
// They have packages in common:
//
//	command       the Factory: what a command needs; flags for the cluster and the connection, login, consent,
//	              lists to pick an argument from
//	daemonclient  requests to the daemon; starts it, and hands it the root helper
//	term          output formats, tables, progress, questions
//
// connect, as an example of a path:
//
//	connect/connect.go ─▶ command/login.go: run the credential plugin, check that the API server answers
//	                   ─▶ command/consent.go ─▶ daemonclient/connect.go: start the daemon and the helper, POST
//	                      └─ the cluster needs consent: ask the user, send the request again
//
// The package does not import the daemon or the helper: cmd/kubevpn injects them as command.Programs.
package cli
