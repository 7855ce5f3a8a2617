package manager

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// table is where a reflector writes one resource. It stands in for an informer: an informer would hold all
// objects a second time, as the API has them, beside the few words of each that the cluster keeps.
type table struct {
	c       *cluster
	r       resource
	set     func(object any)
	remove  func(namespace, name string)
	discard func()
}

var _ cache.TransformingStore = table{}

// tableOf makes a table of objects of type T. Its functions are called with c.mu held.
func tableOf[T any](c *cluster, r resource, set func(*T), remove func(namespace, name string), discard func()) table {
	return table{c, r, func(object any) {
		if o, ok := object.(*T); ok { // the reflector has checked the type
			set(o)
		}
	}, remove, discard}
}

func (t table) update(change func()) error {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	change()
	t.c.notify()
	return nil
}

// Add is a reflector's word for a new object.
func (t table) Add(object any) error { return t.update(func() { t.set(object) }) }

// Update is a reflector's word for a changed object.
func (t table) Update(object any) error { return t.update(func() { t.set(object) }) }

// Delete is a reflector's word for an object that is gone.
func (t table) Delete(object any) error {
	o, err := meta.Accessor(object)
	if err != nil {
		return err
	}
	return t.update(func() { t.remove(o.GetNamespace(), o.GetName()) })
}

// Replace is a reflector's word for all there is, when it begins and after it was cut off for long.
func (t table) Replace(objects []any, _ string) error {
	return t.update(func() {
		t.discard()
		for _, o := range objects {
			t.set(o)
		}
		t.c.synced[t.r], t.c.needsHosts = true, true
	})
}

// Resync does nothing: nothing here is derived without being watched.
func (t table) Resync() error { return nil }

// Transformer lightens objects before the reflector collects them for its first Replace.
func (t table) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if o, ok := object.(metav1.Object); ok {
			o.SetManagedFields(nil)
			o.SetAnnotations(nil)
		}
		return object, nil
	}
}

// clear forgets everything: the resource may no longer be watched.
func (t table) clear() {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.discard()
	t.c.synced[t.r] = false
	t.c.needsCIDRs, t.c.needsHosts = true, true
	t.c.notify()
}

// none says that the server has no such resource, which is as good as an empty list.
func (t table) none() {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.discard()
	t.c.synced[t.r] = true
	t.c.notify()
}
