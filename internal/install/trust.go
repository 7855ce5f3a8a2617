package install

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// program is the path of the traffic manager in its image.
const program = "/traffic"

// Image returns the image of the trusted traffic manager's Deployment, from which agents, gateways and clones run too.
// It fails if another manager has replaced the trusted one. Errors are *api.Error, or ctx's.
func Image(ctx context.Context, c apiServer, trusted api.TrustedManager) (string, error) {
	d, now, err := readManager(ctx, c.Kube(), trusted.Namespace)
	if err != nil {
		return "", c.ExplainContext(ctx, fmt.Errorf("reading the traffic manager's Deployment: %w", err))
	}
	if err := checkShape(d); err != nil {
		return "", err
	}
	if !now.Same(trusted) {
		return "", api.Errorf(api.ExitConsent,
			"the traffic manager in the namespace %s is not the one that you trusted: its image is now %s, and was %s",
			now.Namespace, now.Image, trusted.Image).
			WithHint("Connect again to be asked: `kubevpn disconnect`, then `kubevpn connect`.")
	}
	return now.Image, nil
}

// NeedsPullSecret reports whether a pod of the traffic manager names a Secret to pull its image; then agents and clones
// need one, too. Unlike the Deployment, pods also name the Secrets of their service account. Errors are *api.Error, or
// ctx's.
func NeedsPullSecret(ctx context.Context, c apiServer, namespace string) (bool, error) {
	pods, err := listManagerPods(ctx, c.Kube(), namespace)
	if err != nil {
		return false, c.ExplainContext(ctx, fmt.Errorf("looking for the traffic manager's pod: %w", err))
	}
	return slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return len(p.Spec.ImagePullSecrets) > 0 }), nil
}

// Find returns the image of the traffic manager in the namespace, or else in the fallback, for a user without a
// connection. consent must include the manager. Errors are *api.Error, or ctx's.
func Find(ctx context.Context, c apiServer, namespace, fallback string, consent api.Consent) (string, error) {
	namespaces := Options{Namespace: namespace, FallbackNamespace: fallback}.namespaces()
	for _, ns := range namespaces {
		d, now, err := readManager(ctx, c.Kube(), ns)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			continue
		}
		if err != nil {
			return "", c.ExplainContext(ctx, fmt.Errorf("looking for the traffic manager in %s: %w", ns, err))
		}
		if err := checkShape(d); err != nil {
			return "", err
		}
		if err := consent.Trusts(now); err != nil {
			return "", err
		}
		return managerImage(d.Spec.Template.Spec), nil
	}
	return "", api.Errorf(api.ExitInstall,
		"cannot find the image of the traffic manager: you can see no traffic manager in %s",
		strings.Join(namespaces, " or ")).
		WithHint("Name an image with --image, or the traffic manager's namespace with --manager-namespace.")
}

// readManager reads the Deployment of the manager in the namespace, and its identity.
func readManager(ctx context.Context, kube kubernetes.Interface,
	namespace string) (d *appsv1.Deployment, identity api.TrustedManager, err error) {
	var n *corev1.Namespace
	var unreadable error
	var reading sync.WaitGroup
	reading.Go(func() { n, unreadable = kube.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{}) })
	d, err = kube.AppsV1().Deployments(namespace).Get(ctx, ManagerName, metav1.GetOptions{})
	reading.Wait()
	if err != nil {
		return nil, identity, err
	}
	return d, identify(d, n, unreadable), nil
}

// identify returns the identity of the Deployment's manager. n and err are the result of reading its namespace.
func identify(d *appsv1.Deployment, n *corev1.Namespace, err error) api.TrustedManager {
	m := manager(d.Namespace, managerImage(d.Spec.Template.Spec), d.CreationTimestamp)
	if err != nil { // an older Role does not allow users to read the namespace
		m.NamespaceUID = "deployment:" + string(d.UID)
		return m
	}
	m.NamespaceUID = string(n.UID)
	return m
}

func manager(namespace, image string, since metav1.Time) api.TrustedManager {
	m := api.TrustedManager{Namespace: namespace, Repository: repository(image), ServiceAccount: ManagerName,
		Image: image}
	if !since.IsZero() {
		m.Age = duration.HumanDuration(time.Since(since.Time))
	}
	return m
}

// repository returns an image without its tag and digest.
func repository(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if colon := strings.LastIndexByte(image, ':'); colon > strings.LastIndexByte(image, '/') {
		image = image[:colon]
	}
	return image
}

// checkShape returns an error if the Deployment does not run the traffic manager, or gives it more rights than it
// needs. An attacker may have created such a Deployment for others to use.
func checkShape(d *appsv1.Deployment) error {
	if isUpstream(d) {
		return upstreamError(d.Namespace)
	}
	differs := podDifferences(d.Spec.Template.Spec)
	if len(differs) == 0 {
		return nil
	}
	return api.Errorf(api.ExitInstall, "the Deployment %s/%s is not the traffic manager as kubevpn installs it: %s",
		d.Namespace, d.Name, strings.Join(differs, "; ")).
		WithHint("Anyone with write access to the namespace could have created it. Nothing was changed.\n"+
			"An admin should check who has access, and reinstall:\n"+
			"  kubectl -n %[1]s get rolebindings -o wide\n"+
			"  kubectl -n %[1]s delete deployment %[2]s\n"+
			"  kubevpn install --manager-namespace %[1]s", d.Namespace, d.Name)
}

// podDifferences lists how a pod differs from the manager's. It allows changes of scheduling, resources, environment,
// pull secrets and further arguments.
func podDifferences(s corev1.PodSpec) (all []string) {
	add := func(differs bool, format string, args ...any) {
		if differs {
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	for _, c := range s.InitContainers {
		add(true, "it has the init container %q", c.Name)
	}
	for _, c := range s.EphemeralContainers {
		add(true, "it has the ephemeral container %q", c.Name)
	}
	add(len(s.Containers) == 0, "it has no container")
	found := false
	for _, c := range s.Containers {
		if c.Name != containerName || found {
			add(true, "it has the container %q", c.Name)
			continue
		}
		found = true
		add(len(c.Command) > 0, "its command is %q", c.Command)
		add(len(c.Args) == 0 || c.Args[0] != "manager", "its arguments are %q", c.Args)
		for _, m := range c.VolumeMounts {
			add(path.Clean(m.MountPath) == "/" ||
				path.Clean(m.MountPath) == program, "the volume %q replaces the program", m.Name)
		}
		if sc := c.SecurityContext; sc != nil {
			add(sc.Privileged != nil && *sc.Privileged, "it is privileged")
			add(sc.AllowPrivilegeEscalation != nil && *sc.AllowPrivilegeEscalation, "it allows privilege escalation")
			if sc.Capabilities != nil {
				add(len(sc.Capabilities.Add) > 0, "it adds the capabilities %v", sc.Capabilities.Add)
			}
		}
	}
	account := cmp.Or(s.ServiceAccountName, s.DeprecatedServiceAccount)
	add(account != ManagerName, "its ServiceAccount is %q", account)
	add(s.HostNetwork, "it uses its node's network (hostNetwork)")
	add(s.HostPID, "it sees its node's processes (hostPID)")
	add(s.HostIPC, "it uses its node's IPC (hostIPC)")
	add(slices.ContainsFunc(s.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil
	}), "it mounts a directory of its node (hostPath)")
	return all
}

// noImage returns an error if there is no image to install.
func (o Options) noImage() error {
	if o.Image != "" {
		return nil
	}
	return api.Errorf(api.ExitInstall,
		"cannot install the traffic manager: no image is set, and this kubevpn is not a release with a default image").
		WithHint("Set one that the nodes can pull: --image REF, KUBEVPN_IMAGE=REF, or `image: REF` in the\n" +
			"configuration file. To make one: `make push-image IMAGE=REF`. An admin can run\n" +
			"`kubevpn install --image REF` once for all users.")
}
