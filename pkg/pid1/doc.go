// Package pid1 is what the first process of a namespace or a container does besides its work: it starts programs as a shell
// would, waits for them and for every orphan that becomes its child, signals only what still runs, and tells whoever is at the other
// end of its socket what failed.
//
// It stands below the three that are such a process: a sandbox's init (pkg/sandbox), the first process of the containers of
// `kubevpn dev --docker` (internal/docker) and of a clone with --sync (internal/supervisor). All but Failure is Linux only.
//
//	Start ──▶ program ── ends ──▶ SIGCHLD ──▶ Reap ──▶ Process.Done
//	             └─ orphans ── end ──▶ SIGCHLD ──▶ Reap
package pid1
