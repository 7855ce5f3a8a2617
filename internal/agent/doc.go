// Package agent is `traffic agent`: a container in a pod of an intercepted workload, which gives the requests that laptops
// have claimed to them, and the others to the application. It shares the pod's network namespace.
//
//	laptop ═ manager, or port-forward ═▶ door: TLS 1.3, an owner's key ─▶ transport.Server, one per owner
//	                                                                        │ control stream: orders, reports
//	                                                                        ▼
//	eth0 ─▶ redirects (pkg/redirect) ─▶ plane ─▶ pkg/interceptor ◀─ claims ─┘
//	                                              ├─▶ a stream that the agent opens to the laptop
//	                                              └─▶ the application
//
// There is one agent per owner, which is one daemon of one user on one laptop, because it is with the owner's own rights
// that it gets into the pod; and one of them does the work of all.
//
//	           the socket is free                    SIGTERM, reset, or nobody left
//	┌─────────┐ ────────────────▶ ┌─────────┐ ──────────────────────────────────▶ ┌──────────┐ ────▶ end
//	│ standby │  primary dies     │ primary │                                     │ draining │
//	└─────────┘ ◀── it is bound   └─────────┘   redirects are gone; what is open  └──────────┘
//	     │                                      has 20 s
//	     └──▶ end: the primary has forgotten its owner
//
// Who has bound the abstract unix socket api.AgentSocket is the primary. A later agent connects there, registers the hash of
// its owner's key, prints the primary's greeting as its own, and waits for the connection's end: then the socket is free.
// Nothing is handed over but that: the laptops read another greeting and claim anew, and meanwhile the application serves.
//
//	          a carrier            its last carrier is lost, or silent for 3 s        a minute
//	known ──────────────▶ attached ──────────────────────────────────────────▶ away ───────────▶ released
//	  │                    ▲    ▲                                              │
//	  │                    │    └──────────────────────────────────────────────┘ a carrier
//	  └── a minute without a claim and without a carrier ──▶ forgotten
//
// An owner's claims match only while it is attached. Released are all claims of who was away for a minute, and at once those
// of who ends the session, or says so. An owner is forgotten by the primary unless it is the primary's own, and its standby
// then ends: a container that runs is one whose owner may give orders. The primary ends when it is left alone: no other
// owner, no claim and no carrier for a minute, no connection that it still carries.
//
// Before Linux 5.12 the kernel does not remove an agent's redirects. There the agent has a guardian, which starts it and removes
// them when it has ended.
//
// A sidecar (Config.Listen) is the same without redirects: Services lead to ports of its own, which it listens on from the
// beginning, and it never ends by itself, as nobody else would serve there. The primary listens for those that stand by as well.
//
//	agent.go     standby, primary, draining
//	standby.go   what standby and primary say to each other
//	primary.go   owners, carriers, and the minutes
//	claim.go     claims, and which of them exclude each other
//	control.go   a laptop's orders, and reports to it
//	taker.go     streams to a laptop
//	plane.go     listeners, redirects, the application
//	kernel.go    redirects, as the kernel has them
//	guardian.go  the agent's parent on an old kernel
package agent
