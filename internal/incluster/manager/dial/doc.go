// Package dial makes the traffic manager's connections for the flows of laptops.
//
//	flow ─┬─ TCP ──▶ Dialer ─ Service? ─▶ balancer ─▶ connect ─▶ relay ────────▶ pod
//	      ├─ UDP ──▶ Dialer ─ Service? ─▶ balancer ─▶ socket ──▶ exchange ─────▶ pod
//	      └─ echo ─▶ Dialer ────────────────────────▶ ICMP socket ─▶ exchange ─▶ pod
//	                   │
//	                   └─ Policy and Filter (package access): may the laptop reach it?
//
// One Dialer serves all sessions. Flows serve the flows of one session, whose buffers count against its budget.
package dial
