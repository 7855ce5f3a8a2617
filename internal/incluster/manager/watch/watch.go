package watch

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wakeup"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// resource is one of the kinds of objects that the manager watches.
type resource int

const (
	services resource = iota
	endpointSlices
	nodes
	serviceCIDRs
	resources // how many there are
)

// kinds contains the names of the resources in RBAC, whether their objects are in namespaces, and their Go types.
var kinds = [resources]struct {
	group, name string
	namespaced  bool
	object      runtime.Object
}{
	services:       {"", "services", true, &corev1.Service{}},
	endpointSlices: {"discovery.k8s.io", "endpointslices", true, &discoveryv1.EndpointSlice{}},
	nodes:          {"", "nodes", false, &corev1.Node{}},
	serviceCIDRs:   {"networking.k8s.io", "servicecidrs", false, &networkingv1.ServiceCIDR{}},
}

// scope is what one watch covers: a resource in one namespace, or everywhere (metav1.NamespaceAll).
type scope struct {
	resource  resource
	namespace string
}

// scopesOf returns the scopes of a manager that watches these namespaces.
func scopesOf(namespaces []string) (scopes []scope) {
	for r := range resources {
		if !kinds[r].namespaced {
			scopes = append(scopes, scope{r, metav1.NamespaceAll})
			continue
		}
		for _, ns := range namespaces {
			scopes = append(scopes, scope{r, ns})
		}
	}
	return scopes
}

// String returns for example "services in namespace shop".
func (s scope) String() string {
	if s.namespace == metav1.NamespaceAll {
		return kinds[s.resource].name
	}
	return kinds[s.resource].name + " in namespace " + s.namespace
}

func (s scope) contains(name balancer.Name) bool {
	return s.namespace == metav1.NamespaceAll || s.namespace == name.Namespace
}

// verbs are the permissions that a watch needs.
var verbs = [...]string{"list", "watch"}

const (
	rightsInterval = 30 * time.Second // between checks of missing permissions
	absentInterval = 10 * time.Minute // between checks for a resource that the server does not have
	retryFirst     = time.Second      // after the API server failed; doubles up to retryMost
	retryMost      = 30 * time.Second
	confirmAfter   = 5 * time.Second // between two denials that end a watch
)

// watcher watches the scopes that its permissions allow, and checks missing permissions until it has them. Each scope
// has a goroutine of its own, so one without permission does not affect the others.
//
//	ask (SSAR) ─┬── allowed: list, watch, store ── 403 or another error ──▶ ask again
//	            └── denied twice: store cleared, listed in missing ───────▶ ask again later, or when poked
//
// While the API server does not answer, watches retry and stores keep their objects. An API server that restarts, or
// whose authorizer does not answer, denies as well: only a second certain denial, confirmAfter the first, clears a
// store.
type watcher struct {
	kube    kubernetes.Interface // nil: no API access
	cluster *cluster
	log     *slog.Logger
	poked   wakeup.Broadcast // sent when missing permissions may have been granted

	mu     sync.Mutex
	denied map[scope][]string // the verbs; no entry: the API server has not answered yet
	failed bool               // the API server did not answer
}

// state returns the missing permissions, and whether all scopes that the manager may watch are synced.
func (w *watcher) state() (missing []string, ready bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ready = true
	for _, s := range w.cluster.scopes {
		denied, asked := w.denied[s]
		ready = ready && asked && (len(denied) > 0 || w.cluster.isSynced(s))
		for _, verb := range denied {
			missing = append(missing, verb+" "+s.String())
		}
	}
	if w.failed && len(w.denied) == 0 {
		missing = []string{"reach the API server"}
	}
	return missing, ready
}

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	for _, s := range w.cluster.scopes {
		if w.kube == nil {
			w.set(s, verbs[:], nil)
			continue
		}
		watching.Go(func() { w.watch(ctx, s) })
	}
	<-ctx.Done()
	return nil
}

// ask returns the verbs that the manager is denied. A denial that is unsure may be an error of an authorizer.
func (w *watcher) ask(ctx context.Context, s scope) (denied []string, unsure bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, retryMost)
	defer cancel()
	kind := kinds[s.resource]
	for _, verb := range verbs {
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Group: kind.group, Resource: kind.name,
				Namespace: s.namespace},
		}}
		answer, err := w.kube.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return nil, false, fmt.Errorf("reviewing %s %v: %w", verb, s, err)
		}
		if answer.Status.Allowed {
			continue
		}
		denied = append(denied, verb)
		if why := answer.Status.EvaluationError; why != "" {
			unsure = true
			w.log.Warn("cannot check a permission of the manager", "verb", verb, "resource", s, "err", why)
		}
	}
	return denied, unsure, nil
}

// set records the answer of ask. After an error it keeps the previous answer.
func (w *watcher) set(s scope, denied []string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed = err != nil; !w.failed {
		if before := w.denied[s]; !slices.Equal(before, denied) {
			w.log.Info("rights", "resource", s, "missing", denied)
		}
		w.denied[s] = denied
	}
	w.cluster.changed.Raise()
}

// watch keeps the store of s up to date until ctx ends.
func (w *watcher) watch(ctx context.Context, s scope) {
	objects := w.cluster.store(s)
	reflector := cache.NewReflectorWithOptions(w.listerWatcher(s), kinds[s.resource].object, objects,
		cache.ReflectorOptions{Name: s.String()})
	retry := retryFirst
	var doubted time.Time // when a scope whose objects are known was denied first
	for {
		poked, began := w.poked.Next(), time.Now()
		denied, unsure, err := w.ask(ctx, s)
		known := w.cluster.isSynced(s)
		if len(denied) == 0 {
			doubted = time.Time{}
			w.set(s, nil, err)
		}
		if len(denied) == 0 && err == nil {
			err = reflector.ListAndWatchWithContext(ctx)
		}
		long := time.Since(began) > retryMost // not a repeated failure
		if long {
			retry = retryFirst
		}
		wait := retry
		retry = min(2*retry, retryMost)
		switch {
		case ctx.Err() != nil:
			return
		case len(denied) > 0 && known && (unsure || doubted.IsZero() || time.Since(doubted) < confirmAfter):
			wait = confirmAfter
			if doubted.IsZero() && !unsure {
				doubted = began
			}
		case len(denied) > 0:
			wait, retry = rightsInterval, retryFirst
			if known {
				objects.reset(false)
			}
			w.set(s, denied, nil)
		case apierrors.IsNotFound(err): // networking.k8s.io/v1 has no ServiceCIDR before Kubernetes 1.33
			w.log.Info("the API server has no such resource", "resource", s)
			objects.reset(true)
			wait = absentInterval
		case err != nil:
			w.log.Warn("cannot watch", "resource", s, "err", err, "retry", wait)
		case long: // a watch ends after some minutes by design
			wait = 0
		}
		select {
		case <-time.After(wait):
		case <-poked:
		case <-ctx.Done():
			return
		}
	}
}

// listerWatcher lists and watches s.
func (w *watcher) listerWatcher(s scope) cache.ListerWatcher {
	lw := &cache.ListWatch{}
	switch s.resource {
	case services:
		lw = callsOf[*corev1.ServiceList](w.kube.CoreV1().Services(s.namespace), "")
	case endpointSlices:
		lw = callsOf[*discoveryv1.EndpointSliceList](w.kube.DiscoveryV1().EndpointSlices(s.namespace),
			discoveryv1.LabelServiceName)
	case nodes:
		lw = callsOf[*corev1.NodeList](w.kube.CoreV1().Nodes(), "")
	case serviceCIDRs:
		lw = callsOf[*networkingv1.ServiceCIDRList](w.kube.NetworkingV1().ServiceCIDRs(), "")
	}
	return cache.ToListWatcherWithWatchListSemantics(lw, w.kube)
}

// callsOf returns the two calls of a typed client, with a label selector.
func callsOf[L runtime.Object](client interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}, selector string) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = selector
			return client.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = selector
			return client.Watch(ctx, o)
		},
	}
}
