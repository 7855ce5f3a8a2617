// Package access decides which addresses the traffic manager dials for laptops, and an agent for those whose users may
// not exec in its pod.
//
//	flow of a laptop ─▶ Policy: its namespace, its user? ─▶ Filter: the address? ─▶ dialed
//	packet of a laptop ───────────────────────────────────▶ Filter: the address? ─▶ forwarded
//	                        ▲                                  ▲
//	EndpointSlices ─ claims ┘                 nodes, API server ┘      (the watch writes both)
//
// The Filter applies to each address. The Policy exists only if an admin limits laptops to namespaces or to pods of
// which their user may forward ports, and asks the API server about both.
package access
