// Package command gives the commands what they share. A command has a Factory, and builds its flags and requests with:
//
//	factory.go     Factory: streams, environment, clients of the daemon and of clusters; Programs of cmd/kubevpn
//	usage.go       sections of flags, examples, checks of arguments
//	cluster.go     ClusterFlags: select a cluster and the settings
//	login.go       ─▶ Login: run the credential plugin, check that the API server answers; client defaults
//	connection.go  ConnectionFlags: ClusterFlags and the settings of a connection ─▶ api.ConnectRequest
//	consent.go     Consenting: ask the user about the cluster, send the request again
//	complete.go    shell completion with names from the cluster and from the daemon
//
// The groups of commands import this package and not each other.
package command
