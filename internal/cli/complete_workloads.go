package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// completionLimit limits the names of one completion.
const completionLimit = 500

// workloadType is a TYPE with completion.
type workloadType struct {
	name  string
	short string // the short name of kubectl
	list  func(ctx context.Context, kube kubernetes.Interface, namespace string, o metav1.ListOptions) (names []string,
		err error)
}

// workloadTypes returns the built-in types. Commands accept other types too, but completing those would need API
// discovery.
func workloadTypes() []workloadType {
	return []workloadType{
		{"deployment", "deploy",
			func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
				l, err := k.AppsV1().Deployments(ns).List(ctx, o)
				if err != nil {
					return nil, err
				}
				return namesOf(l.Items), nil
			}},
		{"statefulset", "sts",
			func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
				l, err := k.AppsV1().StatefulSets(ns).List(ctx, o)
				if err != nil {
					return nil, err
				}
				return namesOf(l.Items), nil
			}},
		{"daemonset", "ds", func(ctx context.Context, k kubernetes.Interface, ns string,
			o metav1.ListOptions) ([]string, error) {
			l, err := k.AppsV1().DaemonSets(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"replicaset", "rs",
			func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
				l, err := k.AppsV1().ReplicaSets(ns).List(ctx, o)
				if err != nil {
					return nil, err
				}
				return namesOf(l.Items), nil
			}},
		{"cronjob", "cj", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string,
			error) {
			l, err := k.BatchV1().CronJobs(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"service", "svc", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string,
			error) {
			l, err := k.CoreV1().Services(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"pod", "po", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string,
			error) {
			l, err := k.CoreV1().Pods(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
	}
}

// namesOf returns the names of objects.
func namesOf[T any, P interface {
	*T
	GetName() string
}](items []T) []string {
	names := make([]string, len(items))
	for n := range items {
		names[n] = P(&items[n]).GetName()
	}
	return names
}

// completeWorkloads completes TYPE/, and after it the names of the cluster's objects, within completionTimeout.
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
		types := workloadTypes()
		n := slices.IndexFunc(types, func(t workloadType) bool {
			return kind == t.name || kind == t.name+"s" || kind == t.short
		})
		if n < 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
		defer cancel()
		c, prepared, err := k.load(a)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		names, err := types[n].list(ctx, c.Kube(), prepared.Namespace, metav1.ListOptions{Limit: completionLimit})
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var offered []cobra.Completion
		for _, name := range names {
			if full := kind + "/" + name; !slices.Contains(args, full) {
				offered = append(offered, full)
			}
		}
		return offered, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeTypes completes types. It offers a short name only if prefix begins one.
func completeTypes(prefix string) []cobra.Completion {
	var offered []cobra.Completion
	for _, t := range workloadTypes() {
		switch {
		case strings.HasPrefix(t.name, prefix):
			offered = append(offered, t.name+"/")
		case prefix != "" && strings.HasPrefix(t.short, prefix):
			offered = append(offered, t.short+"/")
		}
	}
	return offered
}

// completeIntercepts completes the intercepted workloads of this machine, described by namespace and match.
func (a *app) completeIntercepts(cmd *cobra.Command, args []string,
	_ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	intercepts, err := a.intercepts(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	count := map[string]int{}
	for _, i := range intercepts {
		count[i.Workload]++
	}
	var offered []cobra.Completion
	for _, i := range intercepts {
		name := i.Workload
		if count[name] > 1 {
			name = i.ID
		}
		if !slices.Contains(args, name) {
			what := i.Match
			if i.Clone != nil {
				what = "clone " + i.Clone.Name + ", " + what
			}
			offered = append(offered,
				cobra.CompletionWithDesc(name, fmt.Sprintf("%s, namespace %s: %s", i.Workload, i.Namespace, what)))
		}
	}
	return offered, cobra.ShellCompDirectiveNoFileComp
}

// completeInterceptNamespaces completes the namespaces of this machine's intercepts.
func (a *app) completeInterceptNamespaces(cmd *cobra.Command, _ []string,
	_ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	intercepts, err := a.intercepts(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []cobra.Completion
	for _, i := range intercepts {
		names = append(names, i.Namespace)
	}
	slices.Sort(names)
	return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
}

// intercepts returns the intercepts of the daemon. It fails if no daemon is running.
func (a *app) intercepts(ctx context.Context) ([]api.Intercept, error) {
	paths, err := a.paths()
	if err != nil {
		return nil, err
	}
	status, err := newClient(paths).status(ctx)
	return status.Intercepts, err
}
