package watch

import (
	"context"
	"errors"
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

// watcher watches the scopes that its permissions allow, and checks missing permissions until it has them. A scope
// without permission does not affect the others.
//
//	            ┌── denied twice: store cleared, listed in missing ◀──┐
//	ask (SSAR) ─┤                                                     │ ask again
//	            └── allowed: list, watch, store ──403──▶ poke ────────┘
//
// While the API server does not answer, watches retry and stores keep their objects. An API server that restarts, or
// whose authorizer does not answer, denies as well: only a second certain denial, confirmAfter the first, ends a watch.
type watcher struct {
	kube    kubernetes.Interface // nil: no API access
	cluster *cluster
	log     *slog.Logger
	poked   wakeup.Signal // the permissions may have changed

	mu      sync.Mutex
	missing []string
	asked   bool // denied is known
	denied  denials
}

// state returns the missing permissions, and whether all scopes that the manager may watch are synced.
func (w *watcher) state() (missing []string, ready bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ready = w.asked
	for _, s := range w.cluster.scopes {
		ready = ready && (len(w.denied[s]) > 0 || w.cluster.isSynced(s))
	}
	return w.missing, ready
}

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) error {
	if w.kube == nil {
		w.set(denyAll(w.cluster.scopes), nil)
		<-ctx.Done()
		return nil
	}
	running := make(map[scope]func()) // stops a watch and waits for its end
	defer func() {
		for _, stop := range running {
			stop()
		}
	}()
	doubted := make(map[scope]time.Time) // when a watch that runs was denied first
	retry := retryFirst
	for {
		denied, unsure, err := w.ask(ctx)
		if err == nil {
			for _, s := range w.cluster.scopes {
				w.follow(ctx, s, running, doubted, denied, unsure[s])
			}
			retry = retryFirst
		}
		missing := w.set(denied, err)
		var again <-chan time.Time
		switch {
		case err != nil:
			w.log.Warn("cannot check the manager's permissions", "err", err, "retry", retry)
			again = time.After(retry)
			retry = min(2*retry, retryMost)
		case len(doubted) > 0 || len(unsure) > 0:
			again = time.After(confirmAfter)
		case missing:
			again = time.After(rightsInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again:
		case <-w.poked:
		}
	}
}

// follow starts or stops the watch of s. It removes a denial from denied that does not end a watch yet.
func (w *watcher) follow(ctx context.Context, s scope, running map[scope]func(), doubted map[scope]time.Time,
	denied denials, unsure bool) {
	stop, since := running[s], doubted[s]
	switch {
	case len(denied[s]) == 0:
		delete(doubted, s)
		if stop == nil {
			running[s] = wakeup.Go(ctx, func(ctx context.Context) { w.watch(ctx, s) })
		}
	case stop == nil:
	case unsure || since.IsZero() || time.Since(since) < confirmAfter:
		if !unsure && since.IsZero() {
			doubted[s] = time.Now()
		}
		delete(denied, s)
	default:
		stop()
		delete(running, s)
		delete(doubted, s)
		w.cluster.store(s).clear()
	}
}

// denials are the verbs that are denied.
type denials map[scope][]string

func denyAll(scopes []scope) denials {
	d := make(denials)
	for _, s := range scopes {
		d[s] = verbs[:]
	}
	return d
}

// ask checks every permission. unsure are the scopes of which a denial may be an error of an authorizer.
func (w *watcher) ask(ctx context.Context) (denied denials, unsure map[scope]bool, err error) {
	denied, unsure = make(denials), make(map[scope]bool)
	for _, s := range w.cluster.scopes {
		for _, verb := range verbs {
			answer, err := w.review(ctx, verb, s)
			if err != nil {
				return nil, nil, fmt.Errorf("reviewing %s %v: %w", verb, s, err)
			}
			if !answer.Allowed {
				denied[s] = append(denied[s], verb)
			}
			if !answer.Allowed && answer.EvaluationError != "" {
				unsure[s] = true
				w.log.Warn("cannot check a permission of the manager", "verb", verb, "resource", s,
					"err", answer.EvaluationError)
			}
		}
	}
	return denied, unsure, nil
}

// review asks the API server whether the manager has a permission.
func (w *watcher) review(ctx context.Context, verb string, s scope) (authorizationv1.SubjectAccessReviewStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, retryMost)
	defer cancel()
	kind := kinds[s.resource]
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Group: kind.group, Resource: kind.name,
			Namespace: s.namespace},
	}}
	answer, err := w.kube.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return authorizationv1.SubjectAccessReviewStatus{}, err
	}
	return answer.Status, nil
}

// set records the answer and reports whether a permission is missing. After an error it keeps the previous answer.
func (w *watcher) set(denied denials, err error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		if !w.asked {
			w.missing = []string{"reach the API server"}
		}
		return len(w.missing) > 0
	}
	before := w.missing
	w.missing, w.asked, w.denied = nil, true, denied
	for _, s := range w.cluster.scopes {
		for _, verb := range denied[s] {
			w.missing = append(w.missing, verb+" "+s.String())
		}
	}
	if !slices.Equal(w.missing, before) {
		w.log.Info("rights", "missing", w.missing)
	}
	w.cluster.changed.Raise()
	return len(w.missing) > 0
}

// watch keeps the store of s up to date until ctx ends.
func (w *watcher) watch(ctx context.Context, s scope) {
	objects := w.cluster.store(s)
	reflector := cache.NewReflectorWithOptions(w.listerWatcher(s), kinds[s.resource].object, objects,
		cache.ReflectorOptions{Name: s.String()})
	retry := retryFirst
	for {
		began := time.Now()
		err := reflector.ListAndWatchWithContext(ctx)
		if ctx.Err() != nil {
			return
		}
		long := time.Since(began) > retryMost // not a repeated failure
		if long {
			retry = retryFirst
		}
		wait := retry
		retry = min(2*retry, retryMost)
		switch {
		case apierrors.IsNotFound(err): // networking.k8s.io/v1 has no ServiceCIDR before Kubernetes 1.33
			w.log.Info("the API server has no such resource", "resource", s)
			objects.setAbsent()
			wait = absentInterval
		case err != nil:
			w.log.Warn("cannot watch", "resource", s, "err", err, "retry", wait)
		case long: // a watch ends after some minutes by design
			wait = 0
		}
		if !wakeup.Pause(ctx, wait) {
			return
		}
	}
}

// listerWatcher lists and watches s. A Forbidden error makes the watcher check its permissions.
func (w *watcher) listerWatcher(s scope) cache.ListerWatcher {
	list, watchFrom := w.calls(s)
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := list(ctx, o)
			return l, w.noticed(err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			i, err := watchFrom(ctx, o)
			return i, w.noticed(err)
		},
	}
	return cache.ToListWatcherWithWatchListSemantics(lw, w.kube)
}

func (w *watcher) noticed(err error) error {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) && apierrors.IsForbidden(err) {
		w.poked.Raise()
	}
	return err
}

type (
	listCall  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watchCall func(context.Context, metav1.ListOptions) (watch.Interface, error)
)

func (w *watcher) calls(s scope) (listCall, watchCall) {
	switch s.resource {
	case services:
		return callsOf[*corev1.ServiceList](w.kube.CoreV1().Services(s.namespace), "")
	case endpointSlices:
		return callsOf[*discoveryv1.EndpointSliceList](w.kube.DiscoveryV1().EndpointSlices(s.namespace),
			discoveryv1.LabelServiceName)
	case nodes:
		return callsOf[*corev1.NodeList](w.kube.CoreV1().Nodes(), "")
	default:
		return callsOf[*networkingv1.ServiceCIDRList](w.kube.NetworkingV1().ServiceCIDRs(), "")
	}
}

// callsOf returns the two calls of a typed client, with a label selector.
func callsOf[L runtime.Object](client interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}, selector string) (listCall, watchCall) {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = selector
			return client.List(ctx, o)
		}, func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = selector
			return client.Watch(ctx, o)
		}
}
