// Package podenv computes the environment and the volume files that the kubelet gives a container. It reads only
// the API, so a program on the laptop gets them without a process in the pod.
//
//	pod, container ─▶ Reader ─┬─▶ Environment   Services' variables, envFrom, env                        ┐ with the user's
//	                          └─▶ Volumes       ConfigMap, Secret, downward API, projected, token files  ┘ own rights
//	                                └─▶ Follow  changes of the volumes, while a program runs
//
// It follows makeEnvironmentVariables of pkg/kubelet/kubelet_pods.go and the volume plugins of pkg/volume of
// Kubernetes v1.34, with these differences. Variables of the image (ENV) are known only from a running pod
// ([Reader.Seen]). Volumes whose content is only on the node (emptyDir, hostPath, PersistentVolumeClaim, CSI) are a
// [Problem], unless [Reader.Here] says otherwise. Token files have mode 0600, and
// fsGroup changes no modes, because only the laptop's user reads them. The kubelet's annotations
// kubernetes.io/config.seen and config.source are not available.
package podenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

// Problem is a variable or volume of the container that is not available here.
type Problem struct {
	What string // "variable PASSWORD", "volume data at /var/lib/data"
	Err  error
}

func (p Problem) Error() string { return p.What + ": " + p.Err.Error() }

func (p Problem) Unwrap() error { return p.Err }

// Reader reads the environment and volumes of one container. Its methods may be called again, to see changes, but not
// concurrently.
type Reader struct {
	kube      kubernetes.Interface
	pod       *corev1.Pod
	container *corev1.Container

	here map[string]string // directories of this machine that replace volumes, by volume name
	seen map[string]string // the environment of a program in the container; nil if unknown

	ahead *objects // what ReadAhead has read; nil: nothing

	gone   bool // the pod no longer exists, so no token can be bound to it
	tokens map[tokenOf]token
	last   map[string]map[string]File // the last files of each source of a projected volume, by its key
}

type tokenOf struct {
	audience string
	seconds  int64
}

type token struct {
	value            string
	renewAt, expires time.Time
}

// New returns a reader for a container of pod. The pod may be built from a template; fields of a running pod, such
// as the IP, are then empty.
func New(kube kubernetes.Interface, pod *corev1.Pod, container string) (*Reader, error) {
	c := containerOf(pod, container)
	if c == nil {
		return nil, fmt.Errorf("pod %s has no container %q", pod.Name, container)
	}
	return &Reader{kube: kube, pod: pod, container: c, tokens: map[tokenOf]token{}, last: map[string]map[string]File{}},
		nil
}

// Source is a pod whose containers are read. Kube and Pod are as in [New], Here as in [Reader.Here], Running as in
// [Following].
type Source struct {
	Kube    kubernetes.Interface
	Pod     *corev1.Pod // a running pod, or one made from a workload's template
	Here    map[string]string
	Exec    Exec // in the pod; nil if it does not run
	Running func(ctx context.Context) (*corev1.Pod, error)
}

// Reader returns a reader for a container of the pod.
func (s Source) Reader(container string) (*Reader, error) {
	r, err := New(s.Kube, s.Pod, container)
	if err != nil {
		return nil, err
	}
	return r, r.Here(s.Here)
}

// Here replaces volumes of the pod, keyed by the volume's name, by directories of this machine, or by Remote or
// RemoteWritable. A volume that the pod does not have is an *api.Error.
func (r *Reader) Here(directories map[string]string) error {
	names := api.Texts(r.pod.Spec.Volumes, func(v corev1.Volume) string { return v.Name })
	for name := range directories {
		if !slices.Contains(names, name) {
			return api.Errorf(api.ExitUsage, "the pod has no volume %q", name).
				WithHint("it has %s", cmp.Or(strings.Join(names, ", "), "none"))
		}
	}
	r.here = directories
	return nil
}

// become replaces the pod by its current state, or by another pod of the workload. It keeps containers and volumes,
// because the program uses these, and the new pod may name them differently.
func (r *Reader) become(pod *corev1.Pod) {
	if pod.UID != r.pod.UID {
		clear(r.tokens)
	}
	pod = pod.DeepCopy()
	pod.Spec.InitContainers, pod.Spec.Containers, pod.Spec.Volumes = r.pod.Spec.InitContainers, r.pod.Spec.Containers,
		r.pod.Spec.Volumes
	r.pod, r.gone = pod, false
}

// unbind makes later tokens independent of a pod, because the pod is gone.
func (r *Reader) unbind() {
	if !r.gone {
		r.gone = true
		clear(r.tokens)
	}
}

// Exec runs a command in a container of the pod until it ends, and writes its output to stdout.
type Exec func(ctx context.Context, container string, command []string, stdout io.Writer) error

// seeTimeout is the timeout for reading the environment of a running container.
const seeTimeout = 5 * time.Second

// See reads the environment of a program in the container with exec and cat, and passes it to [Reader.Seen]. With a
// nil exec it does nothing.
func (r *Reader) See(ctx context.Context, exec Exec) error {
	if exec == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, seeTimeout)
	defer cancel()
	var out environ
	if err := exec(ctx, r.container.Name, []string{"cat", "/proc/self/environ"}, &out); err != nil {
		return fmt.Errorf("cannot read the environment of container %s: %w", r.container.Name, err)
	}
	r.Seen(out.read)
	return nil
}

// environ collects an environment. It limits the size to what Linux allows, because cat in an image may be any program.
type environ struct{ read []byte }

const environBytes = 6 << 20

func (e *environ) Write(b []byte) (int, error) {
	if len(e.read)+len(b) > environBytes {
		return 0, fmt.Errorf("the environment is larger than %d bytes", environBytes)
	}
	e.read = append(e.read, b...)
	return len(b), nil
}

// Seen sets the environment of a program in the container, in the format of /proc/self/environ. Environment then
// includes the image's variables, and those that this user may not read from the API.
func (r *Reader) Seen(environ []byte) {
	r.seen = map[string]string{}
	for entry := range strings.SplitSeq(string(environ), "\x00") {
		if name, value, ok := strings.Cut(entry, "="); ok {
			r.seen[name] = value
		}
	}
}

// objects reads ConfigMaps, Secrets, nodes and Services, each once. It is safe for concurrent use.
type objects struct {
	ctx       context.Context
	kube      kubernetes.Interface
	namespace string

	mu    sync.Mutex
	reads map[string]any // by kind and name: func() (T, error)
}

func (r *Reader) objects(ctx context.Context) *objects {
	if r.ahead != nil {
		return r.ahead
	}
	return &objects{ctx: ctx, kube: r.kube, namespace: r.pod.Namespace, reads: map[string]any{}}
}

// data returns what a ConfigMap or Secret contains. Variables cannot have the binary data of a ConfigMap.
func (o *objects) data(kind, name string, binary bool) (map[string][]byte, error) {
	if kind == KindSecret {
		s, err := once(o, kind+"/"+name, func() (*corev1.Secret, error) {
			return o.kube.CoreV1().Secrets(o.namespace).Get(o.ctx, name, metav1.GetOptions{})
		})
		if err != nil {
			return nil, err
		}
		return s.Data, nil
	}
	m, err := once(o, kind+"/"+name, func() (*corev1.ConfigMap, error) {
		return o.kube.CoreV1().ConfigMaps(o.namespace).Get(o.ctx, name, metav1.GetOptions{})
	})
	if err != nil {
		return nil, err
	}
	data := make(map[string][]byte, len(m.Data))
	if binary {
		maps.Copy(data, m.BinaryData)
	}
	for k, v := range m.Data {
		data[k] = []byte(v)
	}
	return data, nil
}

func (o *objects) node(name string) (*corev1.Node, error) {
	if name == "" {
		return nil, errors.New("the node defines it, and the pod has no node")
	}
	return once(o, "Node/"+name, func() (*corev1.Node, error) {
		return o.kube.CoreV1().Nodes().Get(o.ctx, name, metav1.GetOptions{})
	})
}

// servicesBeside returns the Services of the pod's namespace.
func (o *objects) servicesBeside() (*corev1.ServiceList, error) {
	return once(o, "Services", func() (*corev1.ServiceList, error) {
		return o.kube.CoreV1().Services(o.namespace).List(o.ctx, metav1.ListOptions{})
	})
}

// apiServerService returns the Service of the API server.
func (o *objects) apiServerService() (*corev1.Service, error) {
	return once(o, "Service/kubernetes", func() (*corev1.Service, error) {
		return o.kube.CoreV1().Services(metav1.NamespaceDefault).Get(o.ctx, "kubernetes", metav1.GetOptions{})
	})
}

// once returns the result of the first read with that key, which may be an error. Each key has one type T.
func once[T any](o *objects, key string, read func() (T, error)) (T, error) {
	o.mu.Lock()
	first, ok := o.reads[key].(func() (T, error))
	if !ok {
		first = sync.OnceValues(read)
		o.reads[key] = first
	}
	o.mu.Unlock()
	return first()
}

const (
	defaultTokenSeconds = 3600 // lifetime of a projected token without expirationSeconds
	// A token is renewed after this share of its lifetime, and at least once a day, as in pkg/kubelet/token.
	renewShare = 0.8
	renewAfter = 24 * time.Hour
)

// token returns a token of the pod's service account for an audience ("" for the API server's), and renews it before it
// expires. The token is bound to the pod and becomes invalid when the pod is deleted.
func (r *Reader) token(ctx context.Context, of tokenOf) (string, error) {
	now := time.Now().Round(0) // the wall clock: the monotonic clock stops while the machine sleeps
	known, ok := r.tokens[of]
	if ok && now.Before(known.renewAt) {
		return known.value, nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &of.seconds}}
	if of.audience != "" {
		request.Spec.Audiences = []string{of.audience}
	}
	if r.pod.UID != "" && !r.gone {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod",
			Name: r.pod.Name, UID: r.pod.UID}
	}
	name := cmp.Or(r.pod.Spec.ServiceAccountName, "default")
	got, err := r.kube.CoreV1().ServiceAccounts(r.pod.Namespace).CreateToken(ctx, name, request, metav1.CreateOptions{})
	switch {
	case err != nil && now.Before(known.expires):
		return known.value, nil // still valid; the next call tries again
	case err != nil:
		return "", fmt.Errorf("cannot request a token of service account %s: %w", name, err)
	}
	life := time.Duration(float64(got.Status.ExpirationTimestamp.Sub(now)) * renewShare)
	r.tokens[of] = token{value: got.Status.Token, renewAt: now.Add(min(life, renewAfter)),
		expires: got.Status.ExpirationTimestamp.Time}
	return got.Status.Token, nil
}
