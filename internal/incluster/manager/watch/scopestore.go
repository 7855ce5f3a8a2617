package watch

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"kubevpn/pkg/datapath/balancer"
)

// scopeStore is the store to which a reflector writes one scope. An informer's store would hold all objects as the API
// has them; a scopeStore passes on the few fields that the cluster keeps.
type scopeStore struct {
	c       *cluster
	scope   scope
	set     func(name balancer.Name, object any) // adds or replaces an object; nil: removes it
	discard func()                               // removes all objects of the scope
}

var _ cache.TransformingStore = scopeStore{}

// storeOf returns a scopeStore of objects of type T. convert returns the fields of an object that the cluster keeps,
// and set stores them; given the zero value, set removes the object. The keys of known are the names of the stored
// objects, of all scopes. It calls both functions with c.mu held.
func storeOf[T, V, E any](c *cluster, s scope, known map[balancer.Name]E, convert func(*T) V,
	set func(balancer.Name, V)) scopeStore {
	var none V
	return scopeStore{c, s, func(name balancer.Name, object any) {
		if o, ok := object.(*T); ok {
			set(name, convert(o))
		} else {
			set(name, none)
		}
	}, func() {
		for name := range known {
			if s.contains(name) {
				set(name, none)
			}
		}
	}}
}

func (t scopeStore) update(change func()) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	change()
	t.c.changed.Raise()
}

// Add adds or replaces an object.
func (t scopeStore) Add(object any) error {
	name, err := nameOf(object)
	if err == nil {
		t.update(func() { t.set(name, object) })
	}
	return err
}

// Update is Add.
func (t scopeStore) Update(object any) error { return t.Add(object) }

// Delete removes an object.
func (t scopeStore) Delete(object any) error {
	name, err := nameOf(object)
	if err == nil {
		t.update(func() { t.set(name, nil) })
	}
	return err
}

// Replace replaces all objects of the scope. The reflector calls it after each list.
func (t scopeStore) Replace(objects []any, _ string) (err error) {
	t.update(func() {
		t.discard()
		for _, o := range objects {
			var name balancer.Name
			if name, err = nameOf(o); err != nil {
				return
			}
			t.set(name, o)
		}
		t.c.synced[t.scope], t.c.needsHosts = true, true
	})
	return err
}

func nameOf(object any) (balancer.Name, error) {
	o, err := meta.Accessor(object)
	if err != nil {
		return balancer.Name{}, err
	}
	return balancer.Name{Namespace: intern(o.GetNamespace()), Name: intern(o.GetName())}, nil
}

// Resync does nothing, because the cluster's state follows from the watches alone.
func (t scopeStore) Resync() error { return nil }

// Transformer removes large fields of objects before the reflector collects them for its first Replace.
func (t scopeStore) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if o, ok := object.(metav1.Object); ok {
			o.SetManagedFields(nil)
			o.SetAnnotations(nil)
		}
		return object, nil
	}
}

// reset removes all objects of the scope. known: the API server has no such resource, which counts as an empty list;
// otherwise the manager may no longer watch the scope.
func (t scopeStore) reset(known bool) {
	t.update(func() {
		t.discard()
		t.c.synced[t.scope] = known
		t.c.needsCIDRs, t.c.needsHosts = true, true
	})
}
