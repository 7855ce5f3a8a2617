// Package podenv computes what the kubelet gives a container of a pod: its environment and the files of its volumes, from the
// API alone, so that a program on the laptop gets the same without anything being run in the pod.
//
//	pod, container ─▶ Reader ─┬─▶ Environment   Services' variables, envFrom, env                        ┐ with the user's
//	                          └─▶ Volumes       ConfigMap, Secret, downward API, projected, token files  ┘ own rights
//
// It follows makeEnvironmentVariables of pkg/kubelet/kubelet_pods.go and the volume plugins of pkg/volume of Kubernetes
// v1.34. Differences: what is only the image's (its ENV) is not there; what is only on the node (emptyDir's and hostPath's
// contents, PersistentVolumeClaims, CSI) is named and not shown.
package podenv

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Problem is something that the container has, and that cannot be had here.
type Problem struct {
	What string // "variable PASSWORD", "volume data at /var/lib/data"
	Err  error
}

func (p Problem) Error() string { return p.What + ": " + p.Err.Error() }

func (p Problem) Unwrap() error { return p.Err }

// Reader reads for one container. Its methods may be called again, to see what has changed, and not concurrently.
type Reader struct {
	kube      kubernetes.Interface
	pod       *corev1.Pod
	container *corev1.Container

	mu     sync.Mutex
	tokens map[tokenOf]token
}

type tokenOf struct {
	audience string
	seconds  int64
}

type token struct {
	value   string
	renewAt time.Time
}

// New gives a reader for a container of pod. The pod may be one that does not run, made of a template: then what only a pod
// that runs has (its IP) is empty.
func New(kube kubernetes.Interface, pod *corev1.Pod, container string) (*Reader, error) {
	at := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == container })
	if at < 0 {
		return nil, fmt.Errorf("pod %s has no container %q", pod.Name, container)
	}
	return &Reader{kube: kube, pod: pod, container: &pod.Spec.Containers[at], tokens: map[tokenOf]token{}}, nil
}

// objects are ConfigMaps and Secrets, each read once.
type objects struct {
	ctx        context.Context
	kube       kubernetes.Interface
	namespace  string
	configMaps map[string]result[*corev1.ConfigMap]
	secrets    map[string]result[*corev1.Secret]
}

type result[T any] struct {
	value T
	err   error
}

func (r *Reader) objects(ctx context.Context) *objects {
	return &objects{
		ctx: ctx, kube: r.kube, namespace: r.pod.Namespace,
		configMaps: map[string]result[*corev1.ConfigMap]{}, secrets: map[string]result[*corev1.Secret]{},
	}
}

func (o *objects) configMap(name string) (*corev1.ConfigMap, error) {
	return once(o.configMaps, name, func() (*corev1.ConfigMap, error) {
		return o.kube.CoreV1().ConfigMaps(o.namespace).Get(o.ctx, name, metav1.GetOptions{})
	})
}

func (o *objects) secret(name string) (*corev1.Secret, error) {
	return once(o.secrets, name, func() (*corev1.Secret, error) {
		return o.kube.CoreV1().Secrets(o.namespace).Get(o.ctx, name, metav1.GetOptions{})
	})
}

func once[T any](known map[string]result[T], name string, read func() (T, error)) (T, error) {
	got, ok := known[name]
	if !ok {
		got.value, got.err = read()
		known[name] = got
	}
	return got.value, got.err
}

const (
	defaultTokenSeconds = 3600 // of a projected token that says nothing
	// renewAt of its life a token is renewed, or after a day, as pkg/kubelet/token does.
	renewShare = 0.8
	renewAfter = 24 * time.Hour
)

// token gives the pod's service account's token for an audience ("": the API server's), the same one until most of its life
// is over. The token is bound to the pod, and worthless when that is gone.
func (r *Reader) token(ctx context.Context, of tokenOf) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if known, ok := r.tokens[of]; ok && now.Before(known.renewAt) {
		return known.value, nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &of.seconds}}
	if of.audience != "" {
		request.Spec.Audiences = []string{of.audience}
	}
	if r.pod.UID != "" {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: r.pod.Name, UID: r.pod.UID}
	}
	name := r.pod.Spec.ServiceAccountName
	if name == "" {
		name = "default"
	}
	got, err := r.kube.CoreV1().ServiceAccounts(r.pod.Namespace).CreateToken(ctx, name, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("a token of service account %s: %w", name, err)
	}
	life := time.Duration(float64(got.Status.ExpirationTimestamp.Sub(now)) * renewShare)
	r.tokens[of] = token{value: got.Status.Token, renewAt: now.Add(min(life, renewAfter))}
	return got.Status.Token, nil
}
