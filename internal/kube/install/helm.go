package install

import (
	"context"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// helmRelease is a Helm release that owns a traffic manager. kubevpn does not change its objects, because the next
// command of Helm would undo the change or fail.
type helmRelease struct{ namespace, name string }

// helmReleaseOf returns the Helm release that owns an object, or nil.
func helmReleaseOf(o metav1.Object) *helmRelease {
	name := o.GetAnnotations()["meta.helm.sh/release-name"]
	if o.GetLabels()[labelManagedBy] != "Helm" || name == "" {
		return nil
	}
	return &helmRelease{namespace: o.GetNamespace(), name: name}
}

// helmReleaseIn returns the Helm release that owns the traffic manager in a namespace, or nil. If somebody has deleted
// the manager's Deployment, the ServiceAccount shows the release.
func helmReleaseIn(ctx context.Context, kube kubernetes.Interface, namespace string) (*helmRelease, error) {
	d, err := kube.AppsV1().Deployments(namespace).Get(ctx, ManagerName, metav1.GetOptions{})
	owned := metav1.Object(d)
	switch {
	case err == nil && isUpstream(d):
		return nil, nil
	case err != nil && ignoreDenied(err) == nil:
		owned, err = kube.CoreV1().ServiceAccounts(namespace).Get(ctx, ManagerName, metav1.GetOptions{})
	}
	if err == nil {
		return helmReleaseOf(owned), nil
	}
	if err := ignoreDenied(err); err != nil {
		return nil, fmt.Errorf("looking for the traffic manager in %s: %w", namespace, err)
	}
	return nil, nil
}

// refuse returns the error for a change that only Helm may make. command is the Helm command for it.
func (r helmRelease) refuse(command string) error {
	return api.Errorf(api.ExitManaged,
		"the traffic manager in the namespace %s belongs to the Helm release %s, and kubevpn does not change it",
		r.namespace, api.ShellQuote(r.name)).
		WithHint("Run:\n  %s", command)
}

// command returns a helm command for the release.
func (r helmRelease) command(verb string, args ...string) string {
	words := append([]string{"helm", verb, api.ShellQuote(r.name)}, args...)
	return strings.Join(append(words, "--namespace", api.ShellQuote(r.namespace)), " ")
}

// upgrade returns the command that replaces the image. CHART stands for the chart, whose origin the cluster does not
// store.
func (r helmRelease) upgrade(image string) string {
	set := "image.repository=" + repository(image)
	tag, digest, _ := strings.Cut(strings.TrimPrefix(image, repository(image)), "@")
	set += ",image.tag=" + strings.TrimPrefix(tag, ":") + ",image.digest=" + digest
	return r.command("upgrade", "CHART", "--reset-then-reuse-values", "--set-string", api.ShellQuote(set))
}

func (r helmRelease) uninstall() string { return r.command("uninstall") }
