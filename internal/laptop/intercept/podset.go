package intercept

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
)

// podSet has a podIntercept for each pod of the workload.
type podSet struct {
	mu      sync.Mutex       // also guards fields of the podIntercepts and of the Intercept
	changed wakeup.Broadcast // sent when a field that mu guards changes
	listed  bool             // update was called
	byUID   map[types.UID]*podIntercept
	past    uint64 // requests of pods that no longer exist
}

// update sets the workload's pods. It calls start for each new one, and cancels those that no longer exist.
func (s *podSet) update(pods []corev1.Pod, start func(*corev1.Pod) *podIntercept) {
	s.mu.Lock()
	defer s.mu.Unlock()
	there := make(map[types.UID]bool, len(pods))
	for n := range pods {
		p := &pods[n]
		c := s.byUID[p.UID]
		switch {
		case workloads.Finished(p):
			continue
		case p.DeletionTimestamp != nil && (c == nil || !c.active()): // an intercepted one may still serve requests
			continue
		case c == nil:
			c = start(p)
			s.byUID[p.UID] = c
		}
		c.pod = p
		there[p.UID] = true
	}
	for uid, c := range s.byUID {
		if !there[uid] {
			s.past += c.requests.total()
			c.cancel()
			delete(s.byUID, uid)
		}
	}
	s.listed = true
	s.changed.Send()
}

// set calls change with mu held, and wakes all callers of await.
func (s *podSet) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.changed.Send()
}

// count returns the number of intercepted pods, and of all pods.
func (s *podSet) count() (intercepted, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.byUID {
		if c.active() {
			intercepted++
		}
	}
	return intercepted, len(s.byUID)
}

// sorted returns the podIntercepts in the order of their pods' names. The caller holds s.mu.
func (s *podSet) sorted() []*podIntercept {
	return slices.SortedFunc(maps.Values(s.byUID), func(a, b *podIntercept) int { return cmp.Compare(a.name, b.name) })
}

// latestPods returns the pods in the order of their names.
func (s *podSet) latestPods() (pods []*corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allPods()
}

// allPods is latestPods for a caller that holds s.mu.
func (s *podSet) allPods() (pods []*corev1.Pod) {
	for _, c := range s.sorted() {
		pods = append(pods, c.pod)
	}
	return pods
}

// activeSessions returns the sessions of the agents of the intercepted pods.
func (s *podSet) activeSessions() []*agentSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sessions []*agentSession
	for _, c := range s.byUID {
		if c.active() {
			sessions = append(sessions, c.session)
		}
	}
	return sessions
}

// somePod waits for the list of pods without those in gone, and returns one that runs, or nil.
func (s *podSet) somePod(ctx context.Context, gone map[types.UID]bool) (pod *corev1.Pod, err error) {
	err = s.await(ctx, func() bool {
		outdated := false // the list still has a pod that is gone
		for _, c := range s.sorted() {
			if !c.runs() {
				continue
			}
			if !gone[c.pod.UID] {
				pod = c.pod
				break
			}
			outdated = true
		}
		return s.listed && (pod != nil || !outdated)
	})
	return pod, err
}

// await waits until ok returns true. It calls ok with mu held.
func (s *podSet) await(ctx context.Context, ok func() bool) error {
	for {
		s.mu.Lock()
		done, changed := ok(), s.changed.Next()
		s.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
