// Package install installs, finds and removes the traffic manager of a cluster, with the user's own rights.
//
//	Ensure ─ look ──▶ it is there ──────────────▶ repair what is missing, --upgrade ─┐
//	  │        └────▶ it is not, may install ───▶ apply ─────────────────────────────┼─▶ wait ─▶ a running pod
//	  └─ may neither look nor install ─▶ the current namespace, without RBAC ────────┘
//
//	objects.go   the installed objects, typed
//	rights.go    the user's permissions
//	expose.go    the Service for the transport direct
//	apply.go     server-side apply: any number of laptops may do it at once
//	ensure.go    the decision above
//	wait.go      watches until a pod runs
//	judge.go     decides from the watched objects: a pure function
//	remove.go    uninstall
//	manifest.go  the same objects as YAML
//	upstream.go  recognizes the objects of another program of the same name
//	helm.go      managers of Helm releases, which only Helm changes
//	gateway.go   the gateway, an ephemeral container of the running pod
package install
