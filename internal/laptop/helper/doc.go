// Package helper is the part of kubevpn that runs as root. It creates TUN devices, sets their addresses and routes,
// puts the resolver into the path of DNS queries, and removes all of it again. It parses no kubeconfig, runs no plugin,
// opens no socket that another user can reach, and writes only to its own directory (and, if no other method works, to
// resolv.conf).
//
//	CLI ── Start ── sudo ── kubevpn helper ── (new session) kubevpn helper
//	 │                          exits                        │ Serve
//	 └── one end of a socketpair ──▶ daemon: Client ═════════╡
//	                                                         ▼
//	                             Local: pkg/datapath/tun, pkg/host/route, pkg/host/osdns
//
// If the service is installed (internal/laptop/hostservice), systemd starts `kubevpn helper` in place of sudo, for a
// connection to its socket. The helper then accepts only what the policy of root allows (Policy), whatever the user
// allowed.
//
// The helper accepts requests only from the socket that it was started with. When the daemon ends, in whatever way,
// the socket ends: the kernel removes the TUN device and its routes, and the helper removes the rest and exits. When
// the helper ends, in whatever way, the kernel removes the nftables table. The daemon sees it through Done and closes
// the TUN device, and the kernel removes the addresses, the routes and systemd-resolved's settings with it. Only an
// edited resolv.conf can remain, in the one mode that edits it; Recover undoes that at the next start.
//
// Client and Local have the same methods: a process that is root uses Local and needs no helper.
package helper
