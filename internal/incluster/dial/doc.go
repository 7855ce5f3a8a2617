// Package dial makes connections for the flows of laptops: from the traffic manager or, without a balancer and a
// Policy, from the agent in a pod.
//
//	flow ─┬─ TCP ──▶ Dialer ─ Service? ─▶ balancer ─▶ connect ─▶ relay ────────▶ pod
//	      ├─ UDP ──▶ Dialer ─ Service? ─▶ balancer ─▶ socket ──▶ exchange ─────▶ pod
//	      └─ echo ─▶ Dialer ────────────────────────▶ ICMP socket ─▶ exchange ─▶ pod
//	                   │
//	                   └─ Policy and Filter (package access): may the laptop reach it?
//
// One Dialer serves all sessions. Flows serve the flows of one session, whose buffers count against its budget.
package dial
