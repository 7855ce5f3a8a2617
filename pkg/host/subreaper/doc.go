// Package subreaper implements the duties of the first process of a namespace or a container: it starts programs as
// a shell does, reaps them and every orphan that becomes its child, signals only programs that still run, and sends
// errors over a socket.
//
// Three such processes use it: a sandbox's init (pkg/host/sandbox), the first process of the containers of `kubevpn dev
// --docker` (internal/laptop/docker), and that of a clone with --sync (internal/incluster/supervisor). Everything but
// Failure needs Linux.
//
//	Start ──▶ program ── ends ──▶ SIGCHLD ──▶ Reap ──▶ Process.Done
//	             └─ orphans ── end ──▶ SIGCHLD ──▶ Reap
package subreaper
