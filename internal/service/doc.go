// Package service installs the root helper as a service of systemd, so that `kubevpn connect` needs no password.
//
//	CLI ── connect ── /run/kubevpn-helper.sock ── systemd (kubevpn-helper.socket, Accept=yes)
//	 │                                              │ starts, for each connection, with all hardening
//	 │                                              ▼
//	 └──────────── the connection ───────────▶ kubevpn-helper@N.service: /usr/local/libexec/kubevpn/kubevpn helper
//
// The mode of the socket says who may connect. systemd runs no process of kubevpn until somebody does. The helper
// (internal/helper) reads /etc/kubevpn/helper.yaml and accepts only what this policy allows.
package service
