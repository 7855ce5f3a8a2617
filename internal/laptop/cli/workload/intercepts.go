package workload

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
)

// interceptNames completes the intercepted workloads of this machine, described by namespace and match.
func interceptNames(status api.Status, args []string) []cobra.Completion {
	count := map[string]int{}
	for _, i := range status.Intercepts {
		count[i.Workload]++
	}
	var offered []cobra.Completion
	for _, i := range status.Intercepts {
		name := i.Workload
		if count[name] > 1 {
			name = i.ID
		}
		if slices.Contains(args, name) {
			continue
		}
		requests := i.Match
		if i.Clone != nil {
			requests = "clone " + i.Clone.Name + ", " + requests
		}
		offered = append(offered,
			cobra.CompletionWithDesc(name, fmt.Sprintf("%s, namespace %s: %s", i.Workload, i.Namespace, requests)))
	}
	return offered
}

// interceptNamespaces completes the namespaces of this machine's intercepts.
func interceptNamespaces(status api.Status, _ []string) []cobra.Completion {
	names := api.Texts(status.Intercepts, func(i api.Intercept) string { return i.Namespace })
	slices.Sort(names)
	return slices.Compact(names)
}
