// Package manager implements the traffic manager, at which the sessions of laptops end in the cluster. It wires the
// packages below it: Run opens the ports, and metrics and health checks show their state. Imports point down:
//
//	               manager    ports, metrics, health
//	                  │
//	               session    one laptop: control stream, tickets, authorization
//	       ┌──────────┼──────────┐
//	     dial       watch      router
//	flows to pods  the cluster  packets, leases, gateway
//	       └────┬─────┘
//	         access           which addresses laptops may reach (the router asks a function)
//
// A flow, a packet and a change of the cluster take these ways:
//
//	laptop ═ session ═▶ Accept ─▶ Service? ─▶ balancer ─▶ dial ─▶ pod
//	                                            ▲
//	API server ─ watch ─▶ cluster ─▶ Publisher ─┤
//	                                            └▶ notices ─▶ control streams ─▶ laptops
//
//	laptop ═ TLS, by way of the API server or directly ═▶ proxy port ─▶ the same session
//
//	laptop ═ packet streams ═▶ router ─┬─▶ packet streams of another laptop
//	                                   └─▶ TUN device, if a gateway has passed one ─▶ the pod's kernel
//
// The manager needs no privilege: it terminates flows and opens new ones with ordinary sockets. The gateway
// (internal/incluster/gateway) has the privilege to create the TUN device. The manager lists and watches Services,
// EndpointSlices, Nodes and ServiceCIDRs, and gets pods: in all namespaces, or in those of Config.WatchNamespaces. It
// works without a permission that is missing, and reports it in api.ManagerState.Missing. It dials the ClusterIPs that
// it does not know as they are. It stores nothing: after a restart, laptops open new sessions, ask for the inner
// addresses that they had, and get new tickets.
package manager
