package command

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
)

// CompleteWorkloads completes TYPE/, and after it the names of the cluster's objects.
func (k *ClusterFlags) CompleteWorkloads(cmd *cobra.Command, args []string, toComplete string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	kind, _, named := strings.Cut(toComplete, "/")
	if !named {
		offered := completeTypes(kind)
		if cmd.Name() == "proxy" { // a CronJob receives no requests
			offered = slices.DeleteFunc(offered, func(t string) bool { return t == "cronjob/" || t == "cj/" })
		}
		return offered, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
	}
	builtin, ok := workloads.BuiltinKind(kind)
	if !ok {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return k.completeFrom(cmd.Context(),
		func(ctx context.Context, c *client.Cluster, namespace string) ([]cobra.Completion, error) {
			names, err := listNames(ctx, c, builtin.Resource, namespace)
			names = api.Texts(names, func(name string) string { return kind + "/" + name })
			return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) }), err
		})
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

// CompleteContainers completes the containers of the workload in args.
func (k *ClusterFlags) CompleteContainers(cmd *cobra.Command, args []string, _ string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) == 0 || !strings.Contains(args[0], "/") {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return k.completeFrom(cmd.Context(),
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

const (
	completionTimeout = 2 * time.Second // limits the time that a completion waits for the cluster
	completionLimit   = 500             // limits the names of one completion
)

// completeFrom completes with names from the cluster that the flags select.
func (k *ClusterFlags) completeFrom(ctx context.Context,
	list func(ctx context.Context, c *client.Cluster, namespace string) ([]cobra.Completion, error),
) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	if k.Inputs.Kubeconfig == "-" { // the shell's terminal
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	s, err := k.Load()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names, err := list(ctx, s.Cluster, s.Prepared.Namespace)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// CompleteFromStatus completes with names from the status of the daemon, if one runs. args are those before the name.
func (f *Factory) CompleteFromStatus(list func(status api.Status, args []string) []cobra.Completion,
) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		status, err := f.Status(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return list(status, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeKubeconfig completes names of the kubeconfig.
func (k *ClusterFlags) completeKubeconfig(names func(*clientcmdapi.Config) []string) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		rules := clientcmd.NewDefaultClientConfigLoadingRules()
		rules.ExplicitPath = k.Inputs.Kubeconfig
		config, err := rules.Load()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names(config), cobra.ShellCompDirectiveNoFileComp
	}
}

// CompleteNamespaces completes the namespaces of the cluster.
func (k *ClusterFlags) CompleteNamespaces(cmd *cobra.Command, _ []string, _ string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	return k.completeFrom(cmd.Context(),
		func(ctx context.Context, c *client.Cluster, _ string) ([]cobra.Completion, error) {
			return listNames(ctx, c, corev1.SchemeGroupVersion.WithResource("namespaces"), "")
		})
}

// listNames returns at most completionLimit names of objects of a resource. The namespace is empty for resources of the
// cluster.
func listNames(ctx context.Context, c *client.Cluster, resource schema.GroupVersionResource,
	namespace string) ([]string, error) {
	list, err := c.Dynamic().Resource(resource).Namespace(namespace).List(ctx,
		metav1.ListOptions{Limit: completionLimit})
	if err != nil {
		return nil, err
	}
	return api.Texts(list.Items, func(o unstructured.Unstructured) string { return o.GetName() }), nil
}
