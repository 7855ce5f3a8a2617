// Package watch knows the cluster: its Services and their endpoints, names, networks, nodes and pods, the traffic
// manager's own pod, and the manager's permissions.
//
//	API server ─ watcher ─▶ store ─▶ cluster ──changed──▶ Publisher ─┬─▶ balancer, access.Filter, access.Policy (at once)
//	    ▲                              ▲ │                           └─▶ Notices (at most every 100 ms) ─▶ sessions
//	    └────────────── podReader ─────┘ │ blocks of pods that nothing proves
//	                        ▲────────────┘
//
// The watcher watches what its permissions allow. The cluster keeps the few fields of objects that matter, and the
// podReader proves which blocks of addresses belong to pods. A Notice is the state for laptops at one moment.
package watch
