// Package router carries whole packets between the sessions of laptops, and between them and the pod's kernel.
//
//	leases ─ inner addresses ─▶ routes
//	                              │
//	packet streams of a Peer ─▶ Router ─┬─▶ packet streams of another Peer
//	                              ▲     └─▶ TUN device of the gateway ─▶ the pod's kernel
//	                              │                │
//	                              └────────────────┘
//
// A Peer is a session from the Router's point of view: its lease and its packet streams. A gateway
// (internal/incluster/gateway) connects to the socket of ListenGateways, passes its TUN device, and receives the
// networks of the leases.
package router
