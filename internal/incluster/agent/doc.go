//go:build linux

// Package agent is `traffic agent`: a container in a pod of an intercepted workload, which forwards the requests that
// laptops intercept to them, and all others to the application. It shares the pod's network namespace.
//
//	laptop ═ manager, or port-forward ═▶ authlistener: TLS 1.3, an owner's key ─▶ transport.Server, one per owner
//	                                                                        │ control stream: orders, reports
//	                                                                        ▼
//	eth0 ─▶ redirects (pkg/host/redirect) ─▶ receiver ─▶ pkg/protocol/interceptor ◀─ claims ─┘
//	lo ──▶                                               ├─▶ a stream that the agent opens to the laptop
//	                                                     └─▶ the application
//
// A claim is one intercept in one pod. An owner is one daemon of one user on one laptop. Each owner adds an agent of
// its own to the pod, with its own permissions. One of the agents, the leader, does the work of all.
//
//	           the socket is free                    SIGTERM, reset, or no owner left
//	┌─────────┐ ────────────────▶ ┌────────┐ ──────────────────────────────────▶ ┌──────────┐ ────▶ end
//	│ standby │   leader ends     │ leader │                                     │ draining │
//	└─────────┘ ◀── it is bound   └────────┘   redirects are gone; open           └──────────┘
//	     │                                     connections have 20 s
//	     └──▶ end: the leader has forgotten its owner
//
// The agent that has bound the abstract unix socket api.AgentSocket is the leader. A later agent connects there,
// registers the hash of its owner's key, prints the leader's info as its own, and waits for the connection's end: then
// the socket is free. Nothing else is handed over: the laptops read new info and claim again, and meanwhile the
// application serves.
//
//	          a conn              its last conn is lost, or silent for 3 s         a minute
//	known ──────────────▶ attached ──────────────────────────────────────────▶ away ───────────▶ released
//	  │                    ▲    ▲                                              │
//	  │                    │    └──────────────────────────────────────────────┘ a conn
//	  └── a minute without a claim and without a conn ──▶ forgotten
//
// An owner's claims match only while it is attached. The leader releases all claims of an owner that was away for a
// minute, and at once those of a session that the laptop closes. When it forgets an owner, that owner's standby ends:
// as long as an owner's container runs, the owner may give orders. So the leader never forgets its own owner. The
// leader ends when it is alone: no other owner, no claim and no conn for a minute, and no open connection.
//
// Redirects need Linux 5.12. On older kernels each claim fails with an error that says so.
//
// A sidecar (Config.Listen) has no redirects: Services lead to its own ports, on which it listens from the beginning.
// It never ends by itself, because nothing else would serve there. The leader listens for the sidecars that stand by as
// well.
//
//	agent.go        standby, leader, draining
//	standby.go      messages between standby and leader
//	leader.go       owners, their sessions, and timeouts
//	claim.go        claims, and which of them overlap
//	session.go      a laptop's orders, and reports to it
//	record.go       recorded requests, for their owner
//	trace.go        the handling of the requests of `kubevpn why`
//	laptop.go       streams to a laptop
//	clone.go        connections to a clone's pods
//	receiver.go     listeners, redirects
//	application.go  connections to the application
//	kernel.go       redirects in the kernel
//	infoserver.go   the info port, on which an ephemeral agent tells the laptop its key
//	key.go          the agent's key and certificate
//	command.go      the command line
package agent
