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

// completionLimit is how many names a shell is offered.
const completionLimit = 500

// workloadType is a TYPE that can be completed.
type workloadType struct {
	name  string
	short string // kubectl's
	list  func(ctx context.Context, kube kubernetes.Interface, namespace string, o metav1.ListOptions) (names []string, err error)
}

// workloadTypes are the built-in ones. Others can be named too; to complete them, one would have to ask for all there are.
func workloadTypes() []workloadType {
	return []workloadType{
		{"deployment", "deploy", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.AppsV1().Deployments(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"statefulset", "sts", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.AppsV1().StatefulSets(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"daemonset", "ds", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.AppsV1().DaemonSets(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"replicaset", "rs", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.AppsV1().ReplicaSets(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"cronjob", "cj", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.BatchV1().CronJobs(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"service", "svc", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.CoreV1().Services(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
		{"pod", "po", func(ctx context.Context, k kubernetes.Interface, ns string, o metav1.ListOptions) ([]string, error) {
			l, err := k.CoreV1().Pods(ns).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return namesOf(l.Items), nil
		}},
	}
}

// namesOf are the names of objects.
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

// completeWorkloads offers TYPE/, and behind it the cluster's names, if it tells them in time.
func (k *kubeFlags) completeWorkloads(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
		kind, _, named := strings.Cut(toComplete, "/")
		if !named {
			offered := completeTypes(kind)
			if cmd.Name() == "proxy" { // no requests are for it
				offered = slices.DeleteFunc(offered, func(t cobra.Completion) bool { return t == "cronjob/" || t == "cj/" })
			}
			return offered, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
		}
		types := workloadTypes()
		n := slices.IndexFunc(types, func(t workloadType) bool { return kind == t.name || kind == t.name+"s" || kind == t.short })
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

// completeTypes offers the types that begin like that; a short name only where it is what was begun.
func completeTypes(begun string) []cobra.Completion {
	var offered []cobra.Completion
	for _, t := range workloadTypes() {
		switch {
		case strings.HasPrefix(t.name, begun):
			offered = append(offered, t.name+"/")
		case begun != "" && strings.HasPrefix(t.short, begun):
			offered = append(offered, t.short+"/")
		}
	}
	return offered
}

// completeIntercepts offers what is intercepted from here, with where it is.
func (a *app) completeIntercepts(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
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
			offered = append(offered, cobra.CompletionWithDesc(name, fmt.Sprintf("%s, namespace %s: %s", i.Workload, i.Namespace, what)))
		}
	}
	return offered, cobra.ShellCompDirectiveNoFileComp
}

// completeInterceptNamespaces offers the namespaces in which something is intercepted from here.
func (a *app) completeInterceptNamespaces(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
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

// intercepts are those of the daemon, if there is one.
func (a *app) intercepts(ctx context.Context) ([]api.Intercept, error) {
	paths, err := a.paths()
	if err != nil {
		return nil, err
	}
	status, err := newClient(paths).status(ctx)
	return status.Intercepts, err
}
