package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
)

// completeWorkloads completes TYPE/, and after it the names of the cluster's objects.
func (k *kubeFlags) completeWorkloads(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
		kind, _, named := strings.Cut(toComplete, "/")
		if !named {
			offered := completeTypes(kind)
			if cmd.Name() == "proxy" { // a CronJob receives no requests
				offered = slices.DeleteFunc(offered, func(t cobra.Completion) bool {
					return t == "cronjob/" || t == "cj/"
				})
			}
			return offered, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
		}
		builtin, ok := workloads.BuiltinKind(kind)
		if !ok {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return k.completeFrom(cmd.Context(), a,
			func(ctx context.Context, c *client.Cluster, namespace string) ([]cobra.Completion, error) {
				names, err := listNames(ctx, c, builtin.Resource, namespace)
				for i, name := range names {
					names[i] = kind + "/" + name
				}
				return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) }), err
			})
	}
}

// completeTypes completes built-in types: others would need API discovery. It offers a short name only if prefix begins
// one.
func completeTypes(prefix string) []cobra.Completion {
	var offered []cobra.Completion
	for _, k := range workloads.BuiltinKinds() {
		switch {
		case strings.HasPrefix(k.Type, prefix):
			offered = append(offered, k.Type+"/")
		case prefix != "" && strings.HasPrefix(k.Short, prefix):
			offered = append(offered, k.Short+"/")
		}
	}
	return offered
}

// completeContainers completes the containers of the workload in args.
func (k *kubeFlags) completeContainers(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) == 0 || !strings.Contains(args[0], "/") {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return k.completeFrom(cmd.Context(), a,
			func(ctx context.Context, c *client.Cluster, namespace string) ([]cobra.Completion, error) {
				w, err := workloads.New(c).Workload(ctx, namespace, args[0])
				if err != nil {
					return nil, err
				}
				return api.Texts(w.Template.Spec.Containers, func(container corev1.Container) cobra.Completion {
					return cobra.CompletionWithDesc(container.Name, container.Image)
				}), nil
			})
	}
}

// completeIntercepts completes the intercepted workloads of this machine, described by namespace and match.
func (a *app) completeIntercepts(cmd *cobra.Command, args []string,
	_ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.completeFrom(cmd, func(status api.Status) []cobra.Completion {
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
	})
}

// completeInterceptNamespaces completes the namespaces of this machine's intercepts.
func (a *app) completeInterceptNamespaces(cmd *cobra.Command, _ []string,
	_ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.completeFrom(cmd, func(status api.Status) []cobra.Completion {
		names := api.Texts(status.Intercepts, func(i api.Intercept) string { return i.Namespace })
		slices.Sort(names)
		return slices.Compact(names)
	})
}
