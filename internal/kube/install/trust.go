package install

import (
	"context"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// Image returns the image of the trusted traffic manager's Deployment, from which agents, gateways and clones run too.
// It fails if another manager has replaced the trusted one. Errors are *api.Error, or ctx's.
func Image(ctx context.Context, c apiServer, trusted api.TrustedManager) (string, error) {
	d, now, err := readManager(ctx, c.Kube(), trusted.Namespace)
	if err != nil {
		return "", c.ExplainContext(ctx, fmt.Errorf("reading the traffic manager's Deployment: %w", err))
	}
	if err := checkShape(d, nothing); err != nil {
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
		if err := checkShape(d, nothing); err != nil {
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
// needs. An attacker may have created such a Deployment for others to use. changed says what kubevpn has just changed.
func checkShape(d *appsv1.Deployment, changed string) error {
	if isUpstream(d) {
		return upstreamError(d.Namespace)
	}
	differs := podDifferences(d.Spec.Template.Spec)
	if len(differs) == 0 {
		return nil
	}
	return api.Errorf(api.ExitInstall, "the Deployment %s/%s is not the traffic manager as kubevpn installs it: %s",
		d.Namespace, d.Name, strings.Join(differs, "; ")).
		WithHint("Anyone with write access to the namespace, or a policy of the cluster, could have changed it. "+
			"%[3]s\n"+
			"An admin should check who has access, and reinstall:\n"+
			"  kubectl -n %[1]s get rolebindings -o wide\n"+
			"  kubectl -n %[1]s delete deployment %[2]s\n"+
			"  kubevpn install --manager-namespace %[1]s", d.Namespace, d.Name, changed)
}

// nothing is checkShape's changed of a command that has only looked.
const nothing = "Nothing was changed."

// podDifferences lists the fields in which a pod differs from the one that `install` applies, except in what mayDiffer
// allows. A field that this version does not know by name is a difference.
func podDifferences(s corev1.PodSpec) []string {
	want, got := deployment(Options{}).Spec.Template.Spec, s
	var fields [2]map[string]any
	for i, spec := range []*corev1.PodSpec{&want, &got} {
		var err error
		if fields[i], err = runtime.DefaultUnstructuredConverter.ToUnstructured(spec); err != nil {
			return []string{"it cannot be read: " + err.Error()}
		}
	}
	all := differences("", fields[0], fields[1])
	if more := len(all) - maxDifferences; more > 0 {
		all = append(all[:maxDifferences], fmt.Sprintf("and %d more", more))
	}
	return all
}

// maxDifferences limits those that an error names.
const maxDifferences = 5

// differences compares the values of a field; nil is an absent field. at is its path, with slashes.
func differences(at string, want, got any) (all []string) {
	if reflect.DeepEqual(want, got) || mayDiffer(at, want, got) {
		return nil
	}
	w, g := children(want), children(got)
	switch {
	case w != nil || g != nil:
	case got == nil:
		return []string{at + " is missing"}
	default: // somebody else wrote it
		return []string{fmt.Sprintf("%s is %.60s", at, strconv.QuoteToASCII(fmt.Sprint(got)))}
	}
	keys := slices.Concat(slices.Collect(maps.Keys(w)), slices.Collect(maps.Keys(g)))
	slices.Sort(keys)
	for _, key := range slices.Compact(keys) {
		all = append(all, differences(path.Join(at, strings.ReplaceAll(key, "/", "|")), w[key], g[key])...)
	}
	return all
}

// children returns the fields of an object, or the objects of a list by their names. It returns nil for other values.
func children(v any) map[string]any {
	list, is := v.([]any)
	if !is {
		object, _ := v.(map[string]any)
		return object
	}
	all := make(map[string]any, len(list))
	for i, item := range list {
		object, is := item.(map[string]any)
		if !is {
			return nil
		}
		key, _ := object["name"].(string)
		if _, twice := all[key]; twice || key == "" {
			key = fmt.Sprintf("#%d %s", i, key)
		}
		all[key] = object
	}
	return all
}

// mayDiffer reports whether the trusted manager may have got at this path, instead of want: what admins and policies
// change without making another program of it, what the API server fills in, and what versions of kubevpn change.
func mayDiffer(at string, want, got any) bool {
	is := func(patterns ...string) bool {
		return slices.ContainsFunc(patterns, func(p string) bool {
			ok, err := path.Match(strings.Replace(p, "MANAGER", "containers/manager", 1), at)
			return ok && err == nil
		})
	}
	switch {
	case is("affinity", "nodeSelector", "overhead", "preemptionPolicy", "priority", "priorityClassName", "resources",
		"runtimeClassName", "schedulerName", "tolerations", "topologySpreadConstraints", "imagePullSecrets",
		"dnsConfig/options", "terminationGracePeriodSeconds", "securityContext/runAsGroup",
		"MANAGER/securityContext/runAsGroup", "MANAGER/image", "MANAGER/imagePullPolicy", "MANAGER/resources",
		"MANAGER/resizePolicy", "MANAGER/terminationMessagePolicy", "MANAGER/*nessProbe/*Seconds",
		"MANAGER/*nessProbe/*Threshold", "MANAGER/ports/*/name", "MANAGER/ports/*/containerPort",
		"MANAGER/ports/*/protocol", "MANAGER/env/GO[GM][CAE]*", "MANAGER/env/KUBEVPN_APISERVERS/name",
		"MANAGER/env/KUBEVPN_APISERVERS/value"):
		return true
	case got == nil: // the manager does without these
		return is("automountServiceAccountToken", "securityContext/runAsUser", "securityContext/sysctls",
			"securityContext/sysctls/*", "MANAGER/*nessProbe", "MANAGER/ports", "MANAGER/ports/*", "MANAGER/env",
			"MANAGER/env/*")
	case is("MANAGER/env/POD_*/name", "MANAGER/env/POD_*/valueFrom/fieldRef/*"):
		return want == nil // another version may add one
	case is("securityContext/runAsUser", "MANAGER/securityContext/runAsUser"):
		return got != int64(0)
	case is("MANAGER/args"):
		return knownArguments(got)
	}
	// the API server's defaults, and what policies require
	return want == nil && slices.Contains([]string{"dnsPolicy=ClusterFirst", "restartPolicy=Always", "os/name=linux",
		"serviceAccount=" + ManagerName, "hostUsers=false", "shareProcessNamespace=false", "setHostnameAsFQDN=false",
		"containers/manager/terminationMessagePath=/dev/termination-log",
		"containers/manager/securityContext/privileged=false",
		"containers/manager/securityContext/runAsNonRoot=true",
		"containers/manager/securityContext/procMount=Default",
		"containers/manager/securityContext/seccompProfile/type=RuntimeDefault"}, fmt.Sprintf("%s=%v", at, got))
}

// knownArguments reports whether a container's arguments run the manager, with no flags but those that an admin may
// set. Those that remain lead it to other files or addresses: --listen would admit the whole cluster to sessions.
func knownArguments(v any) bool {
	args, _ := v.([]any)
	if len(args) == 0 || args[0] != "manager" {
		return false
	}
	mayHaveValue := false
	for _, v := range args[1:] {
		arg, _ := v.(string)
		if strings.Contains(arg, "$(") { // the kubelet replaces it by a variable's value
			return false
		}
		if mayHaveValue && !strings.HasPrefix(arg, "-") {
			mayHaveValue = false
			continue
		}
		name, _, hasValue := strings.Cut(arg, "=")
		if !slices.Contains([]string{"--log-level", "--watch-namespaces", "--metrics-listen", "--proxy-listen",
			"--health", "--allow-cidr", "--deny-cidr", "--allow-namespaces", "--authorize"}, name) {
			return false
		}
		mayHaveValue = !hasValue
	}
	return true
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
