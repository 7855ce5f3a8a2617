// Package podenv computes what the kubelet gives a container of a pod: its environment and the files of its volumes, from the
// API alone, so that a program on the laptop gets the same without anything being run in the pod.
//
//	pod, container ─▶ Reader ─┬─▶ Environment   Services' variables, envFrom, env                        ┐ with the user's
//	                          └─▶ Volumes       ConfigMap, Secret, downward API, projected, token files  ┘ own rights
//	                                └─▶ Follow  what has changed of them, while a program runs
//
// It follows makeEnvironmentVariables of pkg/kubelet/kubelet_pods.go and the volume plugins of pkg/volume of Kubernetes
// v1.34. Differences: what is only the image's (its ENV) is there only when a pod that runs was asked ([Reader.Seen]); what is
// only on the node (emptyDir's and hostPath's contents, PersistentVolumeClaims, CSI) is named and not shown, unless a directory of
// this machine stands for it ([Reader.Here]). A token's file is
// for its owner alone, and fsGroup changes no modes: whoever reads them is the laptop's user. Annotations that the kubelet keeps
// for itself (kubernetes.io/config.seen and config.source) are in no object.
package podenv

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
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

	here map[string]string // directories of this machine, by the volume that they stand for
	seen map[string]string // what a program in the container has been seen to have; nil: none was

	gone   bool // the pod has, and no token can be bound to it
	tokens map[tokenOf]token
	last   map[string]map[string]File // of each source of a volume that is made of several, by its key
}

type tokenOf struct {
	audience string
	seconds  int64
}

type token struct {
	value            string
	renewAt, expires time.Time
}

// New gives a reader for a container of pod. The pod may be one that does not run, made of a template: then what only a pod
// that runs has (its IP) is empty.
func New(kube kubernetes.Interface, pod *corev1.Pod, container string) (*Reader, error) {
	c := containerOf(pod, container)
	if c == nil {
		return nil, fmt.Errorf("pod %s has no container %q", pod.Name, container)
	}
	return &Reader{kube: kube, pod: pod, container: c, tokens: map[tokenOf]token{}, last: map[string]map[string]File{}}, nil
}

// Here has directories of this machine stand for volumes of the pod, by their names. The pod has to have these volumes.
func (r *Reader) Here(directories map[string]string) error {
	var names []string
	for _, v := range r.pod.Spec.Volumes {
		names = append(names, v.Name)
	}
	for name := range directories {
		if !slices.Contains(names, name) {
			return api.Errorf(api.ExitUsage, "the pod has no volume %q", name).WithHint("it has %s", cmp.Or(strings.Join(names, ", "), "none"))
		}
	}
	r.here = directories
	return nil
}

// become has the reader read for its pod as it is now, or for another one of the workload. Containers and volumes are kept: those of
// the other may be called otherwise, and the program has these.
func (r *Reader) become(pod *corev1.Pod) {
	if pod.UID != r.pod.UID {
		clear(r.tokens)
	}
	pod = pod.DeepCopy()
	pod.Spec.InitContainers, pod.Spec.Containers, pod.Spec.Volumes = r.pod.Spec.InitContainers, r.pod.Spec.Containers, r.pod.Spec.Volumes
	r.pod, r.gone = pod, false
}

// unbind has tokens be of no pod, as there is none.
func (r *Reader) unbind() {
	if !r.gone {
		r.gone = true
		clear(r.tokens)
	}
}

// Exec runs a command in one of the pod's containers until it ends; stdout gets what it writes.
type Exec func(ctx context.Context, container string, command []string, stdout io.Writer) error

// seeTimeout is how long a running container may take to show its environment.
const seeTimeout = 5 * time.Second

// See asks for the environment of a program in the container, as [Reader.Seen] takes it. A nil exec asks nobody. An image without
// cat cannot show it.
func (r *Reader) See(ctx context.Context, exec Exec) error {
	if exec == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, seeTimeout)
	defer cancel()
	var out bytes.Buffer
	if err := exec(ctx, r.container.Name, []string{"cat", "/proc/self/environ"}, &out); err != nil {
		return fmt.Errorf("asking container %s for its environment: %w", r.container.Name, err)
	}
	r.Seen(out.Bytes())
	return nil
}

// Seen tells what the environment of a program in the container is, as /proc/self/environ has it. Environment then has the
// image's variables too, and those that the API does not let this user have.
func (r *Reader) Seen(environ []byte) {
	r.seen = map[string]string{}
	for entry := range strings.SplitSeq(string(environ), "\x00") {
		if name, value, ok := strings.Cut(entry, "="); ok {
			r.seen[name] = value
		}
	}
}

// objects are ConfigMaps, Secrets and nodes, each read once.
type objects struct {
	ctx        context.Context
	kube       kubernetes.Interface
	namespace  string
	configMaps map[string]result[*corev1.ConfigMap]
	secrets    map[string]result[*corev1.Secret]
	nodes      map[string]result[*corev1.Node]
}

type result[T any] struct {
	value T
	err   error
}

func (r *Reader) objects(ctx context.Context) *objects {
	return &objects{
		ctx: ctx, kube: r.kube, namespace: r.pod.Namespace,
		configMaps: map[string]result[*corev1.ConfigMap]{}, secrets: map[string]result[*corev1.Secret]{}, nodes: map[string]result[*corev1.Node]{},
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

func (o *objects) node(name string) (*corev1.Node, error) {
	if name == "" {
		return nil, errors.New("it is what the node has, and the pod is on none")
	}
	return once(o.nodes, name, func() (*corev1.Node, error) { return o.kube.CoreV1().Nodes().Get(o.ctx, name, metav1.GetOptions{}) })
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
	now := time.Now().Round(0) // by the clock on the wall: the other one stands still while the machine sleeps
	known, ok := r.tokens[of]
	if ok && now.Before(known.renewAt) {
		return known.value, nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &of.seconds}}
	if of.audience != "" {
		request.Spec.Audiences = []string{of.audience}
	}
	if r.pod.UID != "" && !r.gone {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: r.pod.Name, UID: r.pod.UID}
	}
	name := r.pod.Spec.ServiceAccountName
	if name == "" {
		name = "default"
	}
	got, err := r.kube.CoreV1().ServiceAccounts(r.pod.Namespace).CreateToken(ctx, name, request, metav1.CreateOptions{})
	switch {
	case err != nil && now.Before(known.expires):
		return known.value, nil // the next time will do
	case err != nil:
		return "", fmt.Errorf("a token of service account %s: %w", name, err)
	}
	life := time.Duration(float64(got.Status.ExpirationTimestamp.Sub(now)) * renewShare)
	r.tokens[of] = token{value: got.Status.Token, renewAt: now.Add(min(life, renewAfter)), expires: got.Status.ExpirationTimestamp.Time}
	return got.Status.Token, nil
}
