package dns

import (
	"maps"
	"slices"
	"sync"
)

// Index is a set of Service names by namespace, in lower case. The zero value is empty and ready to use. It is safe
// for concurrent use.
type Index struct {
	mu    sync.RWMutex
	names map[string]map[string]struct{}
	count int // Services
}

// Apply changes the index atomically. It first removes everything if reset is set, then the names in remove, and
// then adds the names in add. It does not retain the maps.
func (x *Index) Apply(reset bool, add, remove map[string][]string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if reset || x.names == nil {
		x.names, x.count = make(map[string]map[string]struct{}, len(add)), 0
	}
	for namespace, services := range remove {
		known := x.names[namespace]
		x.count -= len(known)
		for _, service := range services {
			delete(known, service)
		}
		x.count += len(known)
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
		x.count -= len(known)
		for _, service := range services {
			known[service] = struct{}{}
		}
		x.count += len(known)
	}
}

// Size returns the number of Services and namespaces together.
func (x *Index) Size() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.count + len(x.names)
}

// Namespaces returns the namespaces that have Services, in order.
func (x *Index) Namespaces() []string {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return slices.Sorted(maps.Keys(x.names))
}

// Has reports whether the index contains the Service.
func (x *Index) Has(namespace, service string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	_, ok := x.names[namespace][service]
	return ok
}
