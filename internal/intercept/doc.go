// Package intercept brings a workload's inbound traffic to this laptop: one Intercept per workload, one cover per pod of it.
//
//	Run ─▶ read the workload ─▶ may the user patch it? ─▶ which ports ─▶ watch its pods ─▶ cover one, and see that it takes traffic
//	    ─▶ cover the others, 8 at a time ─▶ see that ClusterIPs lead here ─▶ begun ─▶ cover those that appear ─▶ ctx ends: leave
//
//	pod                                          this machine
//	 client ─▶ traffic agent ═ TLS 1.3, pkg/transport ═ link ─ server ─▶ 127.0.0.1, else ::1
//	              ▲    by way of the session, where the traffic manager dials the agent, else by a port-forward
//	              └─ claims, releases, canaries
//
// A cover:
//
//	           no agent of ours runs in the pod
//	               ┌──────────────┐
//	waiting ─▶ turn ─▶ agent ─▶ greeting ─▶ link ─▶ claimed ─▶ covered ─▶ the pod goes: gone
//	    ▲          (the pod's log says      ▲ ▲                 │  │
//	    │           where to go, and        │ └── link is down ─┘  │
//	    │           with which key)         └── another greeting ──┘
//	    └── a step failed, or the agent ended: a pause, longer each time
//
// Covers take turns. The pod whose name is the least goes first, and alone: of two developers whose claims overlap, and who
// begin at the same moment, the same one wins everywhere, and the other one has touched one pod. Then any pod may, 8 at a
// time. What went wrong last is the pod's Reason in Status. Errors of the first pods end the intercept; later ones are
// retried.
//
// Everything is done with the user's own rights. Nothing is left on this machine; in the cluster a claim whose owner does
// not answer takes nothing, and is forgotten after a minute, and agents without claims end.
package intercept
