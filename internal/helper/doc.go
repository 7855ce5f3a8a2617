// Package helper is the part of kubevpn that runs as root: it makes TUN devices, puts addresses and routes on
// them, puts the resolver in the path of DNS queries, and takes all of it away again. It parses no
// kubeconfig, runs no plugin, opens no socket that another user could reach, and writes nowhere but to its own
// directory (and, where nothing else is possible, to resolv.conf).
//
//	CLI ── Start ── sudo ── kubevpn helper ── (new session) kubevpn helper
//	 │                          exits                        │ Serve
//	 └── our end of a socketpair ──▶ daemon: Client ═════════╡
//	                                                         ▼
//	                             Local: pkg/tun, pkg/route, pkg/osdns
//
// The helper's only way in is the socketpair that it was started with. When the daemon dies, however, the
// socket ends, and the helper removes everything and exits. When the helper dies, however, the kernel removes
// the nftables table, and the daemon, whom Done tells, closes the TUN device, with which the addresses, the
// routes and systemd-resolved's settings go. What is left is an edited resolv.conf, in the one mode that needs
// it, and Recover undoes that at the next start.
//
// Client and Local have the same methods: with root in the same process there is no need for a helper.
package helper
