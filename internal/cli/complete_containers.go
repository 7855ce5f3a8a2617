package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/workloads"
)

// completeContainers completes the containers of the workload in args, within completionTimeout.
func (k *kubeFlags) completeContainers(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) == 0 || !strings.Contains(args[0], "/") {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
		defer cancel()
		c, prepared, err := k.load(a)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		w, err := workloads.New(c).Workload(ctx, prepared.Namespace, args[0])
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var names []cobra.Completion
		for _, container := range w.Template.Spec.Containers {
			names = append(names, cobra.CompletionWithDesc(container.Name, container.Image))
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
