package cli

import (
	"context"
	"slices"
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
)

func newCompletion(a *app) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print the completion script for a shell",
		Long: "Print a completion script for bash, zsh, fish or powershell. It completes commands, flags, contexts,\n" +
			"namespaces, workloads and connections.",
		Example: examples(
			"Enable completion in this shell", "source <(kubevpn completion bash)",
			"Enable completion in every new bash",
			"kubevpn completion bash > ~/.local/share/bash-completion/completions/kubevpn",
			"Enable completion in zsh and fish",
			"kubevpn completion zsh > \"${fpath[1]}/_kubevpn\"",
			"kubevpn completion fish > ~/.config/fish/completions/kubevpn.fish",
		),
		ValidArgs: shells,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 || !slices.Contains(shells, args[0]) {
				return api.Errorf(api.ExitUsage, "`kubevpn completion` requires the name of a shell").
					WithHint("specify bash, zsh, fish or powershell")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(a.Out, true)
			case "zsh":
				return root.GenZshCompletion(a.Out)
			case "fish":
				return root.GenFishCompletion(a.Out, true)
			}
			return root.GenPowerShellCompletionWithDesc(a.Out)
		},
	}
}

const (
	completionTimeout = 2 * time.Second // limits the time that a completion waits for the cluster
	completionLimit   = 500             // limits the names of one completion
)

// completeFrom completes with names from the cluster that the flags select.
func (k *kubeFlags) completeFrom(ctx context.Context, a *app,
	list func(ctx context.Context, c *client.Cluster, namespace string) ([]cobra.Completion, error),
) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	if k.in.Kubeconfig == "-" { // the shell's terminal
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	c, prepared, err := k.load(a)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names, err := list(ctx, c, prepared.Namespace)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeFrom completes with names from the status of the daemon, if one runs.
func (a *app) completeFrom(cmd *cobra.Command,
	list func(api.Status) []cobra.Completion) ([]cobra.Completion, cobra.ShellCompDirective) {
	status, err := a.status(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return list(status), cobra.ShellCompDirectiveNoFileComp
}

// completeConnections completes the IDs of connections, described by their clusters.
func (a *app) completeConnections(cmd *cobra.Command, args []string,
	_ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.completeFrom(cmd, func(status api.Status) []cobra.Completion {
		var ids []cobra.Completion
		for _, c := range status.Connections {
			if !slices.Contains(args, c.ID) {
				ids = append(ids, cobra.CompletionWithDesc(c.ID, c.Cluster))
			}
		}
		return ids
	})
}

// completeKubeconfig completes names of the kubeconfig.
func (k *kubeFlags) completeKubeconfig(names func(*clientcmdapi.Config) []string) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		rules := clientcmd.NewDefaultClientConfigLoadingRules()
		rules.ExplicitPath = k.in.Kubeconfig
		config, err := rules.Load()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names(config), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeNamespaces completes the namespaces of the cluster.
func (k *kubeFlags) completeNamespaces(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return k.completeFrom(cmd.Context(), a,
			func(ctx context.Context, c *client.Cluster, _ string) ([]cobra.Completion, error) {
				return listNames(ctx, c, corev1.SchemeGroupVersion.WithResource("namespaces"), "")
			})
	}
}

// listNames returns at most completionLimit names of objects of a resource. The namespace is empty for resources of the
// cluster.
func listNames(
	ctx context.Context, c *client.Cluster, resource schema.GroupVersionResource, namespace string,
) ([]string, error) {
	objects, err := c.Dynamic()
	if err != nil {
		return nil, err
	}
	list, err := objects.Resource(resource).Namespace(namespace).List(ctx, metav1.ListOptions{Limit: completionLimit})
	if err != nil {
		return nil, err
	}
	return api.Texts(list.Items, func(o unstructured.Unstructured) string { return o.GetName() }), nil
}
