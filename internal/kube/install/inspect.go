package install

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// Inspection describes the traffic manager that Ensure would use.
type Inspection struct {
	Namespace string
	Installed bool
	Pod       string // that is ready; empty: none
	Node      string // of Pod
	Image     string
	Problem   *api.Error          // why the manager cannot be used, or installed; nil: it can
	Starting  bool                // Problem says that the manager is not ready yet; Ensure waits for it
	Lacking   []client.Permission // that the user needs to use it, or to install it
	Ask       string              // the commands with which an admin lets the user use it
}

// Inspect looks for the traffic manager as Ensure does, and changes nothing. It prefers the namespace in which the user
// can use or install one. Errors are *api.Error, or ctx's.
func Inspect(ctx context.Context, c apiServer, o Options) (Inspection, error) {
	e := &ensurer{kube: c.Kube(), o: o}
	var preferred Inspection
	for n, ns := range o.namespaces() {
		i, err := e.inspect(ctx, ns)
		if err != nil || len(i.Lacking) == 0 {
			return i, c.ExplainContext(ctx, err)
		}
		if n == 0 {
			preferred = i
		}
	}
	return preferred, nil
}

func (e *ensurer) inspect(ctx context.Context, ns string) (Inspection, error) {
	s := e.survey(ctx, ns)
	i := Inspection{Namespace: ns, Lacking: s.lacking}
	switch _, p, denied := client.Denial(s.managerErr); {
	case denied:
		i.Lacking = append(i.Lacking, p)
	case apierrors.IsForbidden(s.managerErr):
		i.Lacking = append(i.Lacking, client.Permission{Verb: "get", Group: "apps", Resource: "deployments"})
	case apierrors.IsNotFound(s.managerErr):
		needs := append(toInstall(ns), toUse(ns)...)
		if apierrors.IsNotFound(s.namespaceErr) {
			needs = append(needs, client.Permission{Verb: "create", Resource: "namespaces"})
		}
		i.Lacking = lacking(ctx, e.kube, needs)
		i.Problem = api.AsError(e.o.noImage())
	case s.managerErr != nil:
		return Inspection{}, s.managerErr
	default:
		e.inspectManager(ctx, &i, s)
	}
	if len(i.Lacking) > 0 {
		i.Ask = e.ask(ctx, ns)
	}
	return i, nil
}

// inspectManager judges the manager at this moment. It does not wait for a problem to end.
func (e *ensurer) inspectManager(ctx context.Context, i *Inspection, s *survey) {
	i.Installed, i.Image = true, managerImage(s.manager.Spec.Template.Spec)
	if err := checkShape(s.manager, nothing); err != nil {
		i.Problem = api.AsError(err)
		return
	}
	v := judge(snapshot{namespace: i.Namespace, deployment: s.manager, sets: e.replicaSets(ctx, i.Namespace),
		pods: s.pods})
	switch {
	case v.ready:
		i.Pod, i.Node, i.Image = v.pod.Name, v.pod.Spec.NodeName, managerImage(v.pod.Spec)
	case v.problem != nil:
		i.Problem = v.problem.err
	default:
		i.Starting = true
		i.Problem = api.Errorf(api.ExitNotReady, "the traffic manager in %s is not ready: %s", i.Namespace, v.detail).
			WithHint("kubectl -n %s describe deployment,pod -l %s=kubevpn", i.Namespace, labelName)
	}
}

// replicaSets returns the ReplicaSets of the manager, or none if the user may not list them.
func (e *ensurer) replicaSets(ctx context.Context, ns string) []*appsv1.ReplicaSet {
	list, err := e.kube.AppsV1().ReplicaSets(ns).List(ctx, managerPods())
	if err != nil {
		return nil
	}
	return pointers(list.Items)
}

// Rights are permissions that belong together, and what they allow.
type Rights struct {
	Gives string
	Needs []client.Permission
}

// Right says what of the Rights the user has.
type Right struct {
	Gives   string
	Missing []client.Permission // none: all of them
}

// RightsTable returns the rights that the commands need in a namespace, with a traffic manager in another one.
func RightsTable(manager, namespace string) []Rights {
	in := func(group, resource string, verbs ...string) []client.Permission {
		return each(verbs, client.Permission{Group: group, Resource: resource, Namespace: namespace})
	}
	agent, exec := in("", "pods/ephemeralcontainers", "patch"), in("", "pods/exec", "create")
	return []Rights{
		{"connect: reach pods, Services and names", append(toUse(manager), each([]string{"get"},
			client.Permission{Group: "apps", Resource: "deployments", Namespace: manager})...)},
		{"connect: the transport api-proxy", each([]string{"get"},
			client.Permission{Resource: "pods/proxy", Namespace: manager})},
		{"connect: the system netstack", each([]string{"patch"},
			client.Permission{Resource: "pods/ephemeralcontainers", Namespace: manager})},
		{"install the traffic manager", toInstall(manager)},
		{"give it its rights: ClusterIPs, names, networks", toGrant(manager)},
		{"proxy: without a restart of pods", append(in("", "pods", "get", "list", "watch"), agent...)},
		{"proxy --mode sidecar, of Deployments", in("apps", "deployments", "get", "patch")},
		{"clone", in("batch", "jobs", "create", "patch", "delete")},
		{"clone with files, dev with variables of images", exec},
		{"dev: variables and files of ConfigMaps", in("", "configmaps", "get")},
		{"dev: variables and files of Secrets; proxy --tls-secret", in("", "secrets", "get")},
		{"dev: tokens of ServiceAccounts", in("", "serviceaccounts/token", "create")},
		{"why --from", append(in("", "pods", "get", "list", "watch"), append(agent, exec...)...)},
	}
}

// Check asks the cluster which of the rights the user has. If it does not answer, Check assumes that the user has them.
func Check(ctx context.Context, c apiServer, table []Rights) []Right {
	var all []client.Permission
	for _, r := range table {
		all = append(all, r.Needs...)
	}
	denied := lacking(ctx, c.Kube(), all)
	var out []Right
	for _, r := range table {
		missing := slices.DeleteFunc(slices.Clone(r.Needs), func(p client.Permission) bool {
			return !slices.Contains(denied, p)
		})
		out = append(out, Right{Gives: r.Gives, Missing: missing})
	}
	return out
}

// AnyPod returns the name of any running pod of the namespace, or "". Errors are *api.Error, or ctx's.
func AnyPod(ctx context.Context, c apiServer, namespace string) (string, error) {
	list, err := c.Kube().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "status.phase=" + string(corev1.PodRunning), Limit: 1})
	if err != nil {
		return "", c.ExplainContext(ctx, fmt.Errorf("looking for a pod: %w", err))
	}
	if len(list.Items) == 0 {
		return "", nil
	}
	return list.Items[0].Name, nil
}
