// Package cluster is the laptop's way to one Kubernetes cluster, with the user's own credentials.
//
//	CLI     Prepare: kubectl's inputs ──▶ one self-contained kubeconfig      kubeconfig.go
//	daemon  Load: that kubeconfig ──▶ Cluster                                cluster.go
//	          Kube         typed client for the API
//	          PortForward  a net.Conn to a port of a pod                     portforward.go
//	                         upgrade.go    HTTP upgrade: SPDY, else WebSocket
//	                         websocket.go  RFC 6455 framing, laptop's side
//	                         spdy.go       the two SPDY streams of a port-forward
//	          CIDRs        what the user's rights show of the networks       cidr.go
//	          Addresses    what must never be routed into the tunnel         dial.go
//	Explain: any of their errors ──▶ what to tell the user                   explain.go
//
// ExecCredential (execplugin.go) runs in a process of its own, between client-go and the credential plugin
// of a kubeconfig, so that a plugin that hangs is killed.
package cluster
