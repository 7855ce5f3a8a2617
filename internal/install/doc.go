// Package install puts the traffic manager into a cluster, finds it there, and takes it out again, with the
// user's own rights.
//
//	Ensure ─ look ──▶ it is there ──────────────▶ repair what is missing, --upgrade ─┐
//	  │        └────▶ it is not, may install ───▶ apply ─────────────────────────────┼─▶ wait ─▶ a running pod
//	  └─ may neither look nor install ─▶ the current namespace, without RBAC ────────┘
//
//	objects.go   what is installed, as typed objects
//	rights.go    what the user may do
//	apply.go     server-side apply: any number of laptops may do it at once
//	ensure.go    the decision above
//	wait.go      watches until a pod runs
//	judge.go     what those watches mean: a pure function
//	remove.go    uninstall
//	manifest.go  the same objects as YAML
//	gateway.go   the gateway, an ephemeral container of the pod that runs
package install
