package connection

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/wakeup"
)

// namesTimeout limits how long a connection waits for the first list of Services.
const namesTimeout = 2 * time.Second

// nameOrigin is the origin of the names of Services.
type nameOrigin int

const (
	nobody      nameOrigin = iota
	fromUser               // the user's own rights: one namespace
	fromManager            // the traffic manager: every namespace
)

// names is the index of the cluster's Services. The manager's list replaces the one that the laptop read with the
// user's rights. It is safe for concurrent use.
type names struct {
	index  *dns.Index
	forget func(changed map[string][]string) // forgets answers about these Services; set before anything is applied
	told   chan struct{}                     // closed when somebody has listed names, or nobody will
	tell   func()                            // closes told; further calls do nothing

	mu   sync.Mutex
	from nameOrigin
}

func newNames() *names {
	told := make(chan struct{})
	return &names{index: new(dns.Index), forget: func(map[string][]string) {}, told: told,
		tell: sync.OnceFunc(func() { close(told) })}
}

// maxNames limits the index: Services and namespaces together.
const maxNames = 128 << 10

// apply applies a delta, unless an earlier one was from a greater source. It returns the number of names that it left
// out, because they are invalid or too many.
func (n *names) apply(from nameOrigin, d api.NameDelta) (left int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if from < n.from {
		return 0
	}
	n.from = from
	room := maxNames
	if !d.Reset {
		room -= n.index.Size() // also counts names that the delta removes or repeats
	}
	add := make(map[string][]string, len(d.Add))
	for ns, services := range d.Add {
		if !isLabel(ns) || len(services) == 0 || room < 2 {
			left += len(services)
			continue
		}
		room-- // the namespace
		valid := slices.DeleteFunc(slices.Clone(services), func(name string) bool { return !isLabel(name) })
		add[ns] = valid[:min(len(valid), room)]
		room -= len(add[ns])
		left += len(services) - len(add[ns])
	}
	n.index.Apply(d.Reset, add, d.Remove)
	n.tell()
	if d.Reset {
		n.forget(nil)
		return left
	}
	for _, changed := range []map[string][]string{add, d.Remove, d.Changed} {
		if len(changed) > 0 {
			n.forget(changed)
		}
	}
	return left
}

// isLabel reports whether name is valid for a Service or a namespace.
func isLabel(name string) bool { return len(validation.IsDNS1123Label(name)) == 0 }

// known returns the best source that has listed names.
func (n *names) known() nameOrigin {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.from
}

// matchable returns the namespaces that a resolver with a server per link may match as if they were top-level domains
// (web.default). It leaves out those with the name of a public or a private top-level domain, whose other names would
// then go to this resolver.
func (n *names) matchable() []string {
	return slices.DeleteFunc(n.index.Namespaces(), dns.ClaimsTLD)
}

// await waits until names are known, so that short names resolve from the first moment. The manager lists them right
// after its hello. After namesTimeout the connection continues without them.
func (n *names) await(ctx context.Context, log *slog.Logger) error {
	select {
	case <-n.told:
	case <-time.After(namesTimeout):
		log.Warn("the names of Services are not known yet", "waited", namesTimeout)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// followNames lists the Services of the connection's namespace with the user's own rights, until ctx ends. It follows
// changes of the namespace.
func (s *shared) followNames(ctx context.Context, kube kubernetes.Interface) error {
	for {
		namespace, changed := s.namespace.Get()
		stop := wakeup.Go(ctx, func(of context.Context) {
			err := client.NewMirror(kube, &corev1.Service{}, metav1.ListOptions{}, kube.CoreV1().Services(namespace)).
				Follow(of, func(list []*corev1.Service) {
					services := api.Texts(list, func(s *corev1.Service) string { return s.Name })
					s.names.apply(fromUser,
						api.NameDelta{Reset: true, Add: map[string][]string{namespace: services}})
					s.changed.Raise()
				})
			s.names.tell() // nobody may list them
			if of.Err() == nil {
				s.status.warn("Services in " + namespace + " have no short names: " + s.cluster.Explain(err).Error())
			}
		})
		select {
		case <-changed:
		case <-ctx.Done():
		}
		stop()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}
