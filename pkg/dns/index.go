package dns

import "sync"

// Services says which Services exist in a cluster. Names are in lower case.
// It must be safe for concurrent use and quick: it is asked several times for each query.
type Services interface {
	Has(namespace, service string) bool
}

// Index is a set of Service names by namespace, fed by deltas. The zero value is empty and ready for use.
// It is safe for concurrent use.
type Index struct {
	mu    sync.RWMutex
	names map[string]map[string]struct{}
}

// Apply changes the index in one step: a lookup sees it as before or as after. With reset, what was there
// is forgotten first; then remove is taken away and add is put in. The maps are not kept.
func (x *Index) Apply(reset bool, add, remove map[string][]string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if reset || x.names == nil {
		x.names = make(map[string]map[string]struct{}, len(add))
	}
	for namespace, services := range remove {
		known := x.names[namespace]
		for _, service := range services {
			delete(known, service)
		}
		if len(known) == 0 {
			delete(x.names, namespace)
		}
	}
	for namespace, services := range add {
		known := x.names[namespace]
		if known == nil && len(services) > 0 {
			known = make(map[string]struct{}, len(services))
			x.names[namespace] = known
		}
		for _, service := range services {
			known[service] = struct{}{}
		}
	}
}

// Has says whether the Service is in the index.
func (x *Index) Has(namespace, service string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	_, ok := x.names[namespace][service]
	return ok
}
