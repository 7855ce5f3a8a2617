// Package client is the laptop's access to the API of one Kubernetes cluster, with the user's own credentials.
//
//	CLI     Prepare: kubectl's inputs ──▶ one self-contained kubeconfig      kubeconfig.go, overrides.go
//	daemon  Load: that kubeconfig ──▶ Cluster                                cluster.go
//	          Reach        is it an API server, and does it know the user?   reach.go
//	          Kube         typed client for the API
//	          Exec         a program in a container                          exec.go
//	          CIDRs        what the user's rights show of the networks       cidr.go
//	          Proxy        what serves ClusterIPs on the nodes               proxymode.go
//	          Addresses    what must never be routed into the tunnel         dial.go
//	Explain: any of their errors ──▶ what to tell the user                   explain.go
//	Permission: a right, and how an admin grants it                          forbidden.go
//
// If the kubeconfig has a credential plugin, the CLI runs it on the user's terminal (Login) and hands the credential to
// the daemon. When the credential expires, the daemon runs the plugin without a terminal (login.go, plugin.go).
//
// Package podconn connects to pods, and package workloads reads and changes workloads, both through a Cluster.
package client
