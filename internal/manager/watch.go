package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

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

// resource is one of the kinds of objects that the manager watches, in all namespaces.
type resource int

const (
	services resource = iota
	endpointSlices
	nodes
	serviceCIDRs
	resources // how many there are
)

// kinds contains the names of the resources in RBAC, and their Go types.
var kinds = [resources]struct {
	group, name string
	object      runtime.Object
}{
	services:       {"", "services", &corev1.Service{}},
	endpointSlices: {"discovery.k8s.io", "endpointslices", &discoveryv1.EndpointSlice{}},
	nodes:          {"", "nodes", &corev1.Node{}},
	serviceCIDRs:   {"networking.k8s.io", "servicecidrs", &networkingv1.ServiceCIDR{}},
}

// verbs are the permissions that a watch needs.
var verbs = [...]string{"list", "watch"}

const (
	rightsInterval = 30 * time.Second // between checks of missing permissions
	absentInterval = 10 * time.Minute // between checks for a resource that the server does not have
	retryFirst     = time.Second      // after the API server failed; doubles up to retryMost
	retryMost      = 30 * time.Second
)

// watcher watches the resources that its permissions allow, and checks missing permissions until it has them.
//
//	            ┌── denied: table cleared, listed in missing ◀────────┐
//	ask (SSAR) ─┤                                                     │ ask again
//	            └── allowed: list, watch, table ──403──▶ poke ────────┘
//
// While the API server does not answer, watches retry and tables keep their objects.
type watcher struct {
	kube   kubernetes.Interface // nil: no API access
	tables [resources]table
	log    *slog.Logger
	poked  wakeup.Signal // the permissions may have changed

	mu      sync.Mutex
	missing []string
	asked   bool // the permissions are known
	allowed [resources]bool
}

func newWatcher(kube kubernetes.Interface, c *cluster, log *slog.Logger) *watcher {
	w := &watcher{kube: kube, log: log, poked: wakeup.NewSignal()}
	for r := range resources {
		w.tables[r] = c.table(r)
	}
	return w
}

// state returns the missing permissions, and whether all resources that the manager may watch are synced.
func (w *watcher) state() (missing []string, ready bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ready = w.asked
	for r := range resources {
		ready = ready && (!w.allowed[r] || w.tables[r].c.isSynced(r))
	}
	return w.missing, ready
}

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) error {
	if w.kube == nil {
		w.set(denyAll(), nil)
		<-ctx.Done()
		return nil
	}
	var running [resources]func() // stops a watch and waits for its end
	defer func() {
		for _, stop := range running {
			if stop != nil {
				stop()
			}
		}
	}()
	retry := retryFirst
	for {
		denied, err := w.ask(ctx)
		if err == nil {
			for r := range resources {
				switch {
				case len(denied[r]) == 0 && running[r] == nil:
					running[r] = w.start(ctx, r)
				case len(denied[r]) > 0 && running[r] != nil:
					running[r]()
					running[r] = nil
					w.tables[r].clear()
				}
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

// denials are the verbs that are denied, by resource.
type denials [resources][]string

func denyAll() (d denials) {
	for r := range d {
		d[r] = verbs[:]
	}
	return d
}

// ask checks every permission.
func (w *watcher) ask(ctx context.Context) (denials, error) {
	ctx, cancel := context.WithTimeout(ctx, retryMost)
	defer cancel()
	var denied denials
	for r := range resources {
		for _, verb := range verbs {
			review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Group: kinds[r].group,
					Resource: kinds[r].name},
			}}
			answer, err := w.kube.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review,
				metav1.CreateOptions{})
			if err != nil {
				return denied, fmt.Errorf("reviewing %s %s: %w", verb, kinds[r].name, err)
			}
			if !answer.Status.Allowed {
				denied[r] = append(denied[r], verb)
			}
		}
	}
	return denied, nil
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
	before := len(w.missing)
	w.missing, w.asked = nil, true
	for r := range resources {
		w.allowed[r] = len(denied[r]) == 0
		for _, verb := range denied[r] {
			w.missing = append(w.missing, verb+" "+kinds[r].name)
		}
	}
	if len(w.missing) != before {
		w.log.Info("rights", "missing", w.missing)
	}
	w.tables[0].c.changed.Raise()
	return len(w.missing) > 0
}

// start begins to watch r. stop ends the watch and waits for its end.
func (w *watcher) start(ctx context.Context, r resource) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.watch(ctx, r)
	}()
	return func() {
		cancel()
		<-done
	}
}

// watch keeps r's table up to date until ctx ends.
func (w *watcher) watch(ctx context.Context, r resource) {
	lw := w.listerWatcher(r)
	reflector := cache.NewReflectorWithOptions(lw, kinds[r].object, w.tables[r],
		cache.ReflectorOptions{Name: kinds[r].name})
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
			w.log.Info("the API server has no such resource", "resource", kinds[r].name)
			w.tables[r].setAbsent()
			wait = absentInterval
		case err != nil:
			w.log.Warn("cannot watch", "resource", kinds[r].name, "err", err, "retry", wait)
		case long: // a watch ends after some minutes by design
			wait = 0
		}
		if !wakeup.Pause(ctx, wait) {
			return
		}
	}
}

// listerWatcher lists and watches r in all namespaces. A Forbidden error makes the watcher check its permissions.
func (w *watcher) listerWatcher(r resource) cache.ListerWatcher {
	list, watchFrom := w.calls(r)
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

func (w *watcher) calls(r resource) (listCall, watchCall) {
	switch r {
	case services:
		return callsOf[*corev1.ServiceList](w.kube.CoreV1().Services(metav1.NamespaceAll), "")
	case endpointSlices:
		return callsOf[*discoveryv1.EndpointSliceList](w.kube.DiscoveryV1().EndpointSlices(metav1.NamespaceAll),
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
