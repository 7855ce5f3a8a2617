// Package workload implements the commands of the help's group Workloads:
//
//	proxy     proxy.go, spec.go   connect if necessary; agents send the requests that match to this machine
//	expose    expose.go           the same with a pod and a Service made for it, in place of a workload
//	clone     clone.go            the same with a clone in the cluster as the target
//	dev       dev.go              the same, while a program of this machine runs (internal/laptop/dev)
//	diff      diff.go             the same with copies of requests, which a program answers too
//	requests  requests.go         the requests that an intercept records
//	leave     leave.go            end intercepts and clones of this machine
//	reset     reset.go            end the intercepts of all users, with the user's own credentials
//	list      list.go             workloads of a namespace, from the API server
//	env       env.go              variables of a container (internal/kube/podenv)
//	cp        cp.go               copy files from and to a container (internal/laptop/filecopy)
//	init      init.go             a first kubevpn.yaml (internal/laptop/project)
//
// leave and requests complete names with intercepts.go. requests and diff have the flag --body of spec.go.
package workload

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{
		newProxy(f), newExpose(f), newClone(f), newDev(f), newEnv(f), newCp(f), newList(f), newRequests(f), newDiff(f),
		newLeave(f), newReset(f), newInit(f),
	}
}
