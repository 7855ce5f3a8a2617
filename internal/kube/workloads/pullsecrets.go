package workloads

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	authnkubernetes "github.com/google/go-containerregistry/pkg/authn/kubernetes"
	"github.com/google/go-containerregistry/pkg/name"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// PullSecrets are the credentials with which the kubelet pulls the images of a pod.
type PullSecrets struct {
	Keys    authn.Keychain
	Missing []error  // why Keys lacks some of them; the kubelet ignores these errors too
	names   []string // of the Secrets
}

// ReadPullSecrets reads the Secrets that the pods of a template pull with: its own, or else those of its service
// account.
func ReadPullSecrets(ctx context.Context, kube kubernetes.Interface, namespace string,
	template corev1.PodSpec) (PullSecrets, error) {
	if len(template.ImagePullSecrets) > 0 {
		return readSecrets(ctx, kube, namespace, template.ImagePullSecrets)
	}
	account := cmp.Or(template.ServiceAccountName, "default")
	found, err := kube.CoreV1().ServiceAccounts(namespace).Get(ctx, account, metav1.GetOptions{})
	if err != nil {
		s, none := readSecrets(ctx, kube, namespace, nil)
		s.Missing = []error{fmt.Errorf("cannot read the pull secrets of the service account %s: %w", account, err)}
		return s, none
	}
	return readSecrets(ctx, kube, namespace, found.ImagePullSecrets)
}

func readSecrets(ctx context.Context, kube kubernetes.Interface, namespace string,
	refs []corev1.LocalObjectReference) (s PullSecrets, err error) {
	var secrets []corev1.Secret
	for _, ref := range refs {
		s.names = append(s.names, ref.Name)
		secret, err := kube.CoreV1().Secrets(namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if err == nil {
			// an invalid one does not affect the others
			_, err = authnkubernetes.NewFromPullSecrets(ctx, []corev1.Secret{*secret})
		}
		if err != nil {
			s.Missing = append(s.Missing, fmt.Errorf("cannot read the pull secret %s: %w", ref.Name, err))
			continue
		}
		secrets = append(secrets, *secret)
	}
	if s.Keys, err = authnkubernetes.NewFromPullSecrets(ctx, secrets); err != nil {
		return PullSecrets{}, fmt.Errorf("cannot read the pull secrets: %w", err)
	}
	return s, nil
}

// CheckPull returns an error if the pods' pull secrets have no credentials for the registry of image, which needs some.
// It returns nil if the user may not read the Secrets. Pass a pod to check whether it can have another container. Pass
// nil for the pods that the workload's template creates.
func CheckPull(ctx context.Context, kube kubernetes.Interface, w *Workload, pod *corev1.Pod, image string) error {
	ref, err := name.ParseReference(image)
	if err != nil {
		return nil // the kubelet reports it
	}
	var secrets PullSecrets
	if pod != nil { // admission has added the Secrets of its service account
		secrets, err = readSecrets(ctx, kube, w.Namespace, pod.Spec.ImagePullSecrets)
	} else {
		secrets, err = ReadPullSecrets(ctx, kube, w.Namespace, w.Template.Spec)
	}
	if err != nil {
		return err
	}
	key, err := secrets.Keys.Resolve(ref.Context())
	if err != nil {
		return fmt.Errorf("reading the credentials for %s: %w", ref.Context(), err)
	}
	unknown := func(err error) bool { return !apierrors.IsNotFound(err) }
	if key != authn.Anonymous || slices.ContainsFunc(secrets.Missing, unknown) {
		return nil
	}
	return noPullSecret(w, secrets, ref.Context().RegistryStr(), image)
}

func noPullSecret(w *Workload, secrets PullSecrets, registry, image string) error {
	why := "they have no pull secret"
	if len(secrets.names) > 0 {
		why = "their pull secrets have no credentials for it: " + strings.Join(secrets.names, ", ")
	}
	for _, err := range secrets.Missing { // none of these Secrets exists
		why += "; " + err.Error()
	}
	ns, account := api.ShellQuote(w.Namespace), api.ShellQuote(cmp.Or(w.Template.Spec.ServiceAccountName, "default"))
	return api.Errorf(api.ExitImagePull,
		"the pods of %s cannot pull %s: the traffic manager needs a pull secret for the registry %s, and %s", w, image,
		registry, why).
		WithHint("Add one to the pods' service account, and restart the pods:\n"+
			"  kubectl -n %[1]s create secret docker-registry kubevpn --docker-server=%[3]s --docker-username=USER "+
			"--docker-password=PASSWORD\n"+
			"  kubectl -n %[1]s patch serviceaccount %[2]s -p '{\"imagePullSecrets\":[{\"name\":\"kubevpn\"}]}'\n"+
			"If the nodes can pull without one, name the image with --image or KUBEVPN_IMAGE. "+
			"docs/how-to/private-registry.md has more.",
			ns, account, api.ShellQuote(registry))
}
