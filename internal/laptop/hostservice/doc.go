// Package hostservice installs the root helper as a service of systemd, or of launchd on macOS, so that `kubevpn
// connect` needs no password. With systemd:
//
//	CLI ── connect ── /run/kubevpn-helper.sock ── systemd (kubevpn-helper.socket, Accept=yes)
//	 │                                              │ starts, for each connection, with all hardening
//	 │                                              ▼
//	 └──────────── the connection ───────────▶ kubevpn-helper@N.service: /usr/local/libexec/kubevpn/kubevpn helper
//
// launchd does the same with one property list (inetdCompatibility in launchd.plist(5)), without the hardening.
//
// The mode of the socket says who may connect. systemd runs no process of kubevpn until somebody does. The helper
// (internal/laptop/helper) reads /etc/kubevpn/helper.yaml and accepts only what this policy allows.
package hostservice
