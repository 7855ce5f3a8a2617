package clone

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/pkg/filesync"
)

// syncs are the files that go to each pod of a clone, from when its container runs until the pod goes. A container that was
// started again has the image's files, and gets all of them anew.
type syncs struct {
	clone     *Clone
	container string

	work sync.WaitGroup

	mu      sync.Mutex
	running map[types.UID]*podSync
}

// podSync is what goes to one pod.
type podSync struct {
	cancel  context.CancelFunc
	sources []*filesync.Source // in the order of the specification's pairs
}

// follow begins for pods whose container runs, and ends for those that have gone.
func (s *syncs) follow(ctx context.Context, pods []corev1.Pod) {
	if len(s.clone.cfg.Spec.Sync) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	there := make(map[types.UID]bool)
	for _, p := range pods {
		if p.DeletionTimestamp != nil || !slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			return c.Name == s.container && c.State.Running != nil
		}) {
			continue
		}
		there[p.UID] = true
		if s.running[p.UID] == nil {
			s.running[p.UID] = s.begin(ctx, p.Namespace, p.Name)
		}
	}
	for uid, p := range s.running {
		if !there[uid] {
			p.cancel()
			delete(s.running, uid)
		}
	}
}

func (s *syncs) begin(ctx context.Context, namespace, pod string) *podSync {
	ctx, cancel := context.WithCancel(ctx)
	p := &podSync{cancel: cancel}
	for n, pair := range s.clone.cfg.Spec.Sync {
		log := s.clone.log.With("pod", pod, "local", pair.Local, "remote", pair.Remote)
		source, err := filesync.NewSource(filesync.SourceConfig{
			Dir: pair.Local, Logger: log,
			Dial: func(context.Context) (net.Conn, error) {
				return s.clone.cfg.Cluster.DialExec(namespace, pod, s.container, []string{api.SupervisorProgram, "sync", strconv.Itoa(n)}), nil
			},
			OnSync: func(b filesync.Batch) {
				log.Info("files synced", "written", b.Files, "removed", b.Removed, "bytes", b.Bytes, "took", b.Took, "failed", len(b.Failed))
			},
		})
		if err != nil { // only what the code gives it can be wrong
			log.Error("syncing files", "err", err)
			continue
		}
		p.sources = append(p.sources, source)
		s.work.Go(func() {
			if err := source.Run(ctx); err != nil {
				log.Error("no files are synced any more", "err", err)
			}
		})
	}
	return p
}

// wait waits for the end of all, after the context of follow has ended.
func (s *syncs) wait() {
	s.mu.Lock()
	for _, p := range s.running {
		p.cancel()
	}
	s.mu.Unlock()
	s.work.Wait()
}

// status is how far each pair is, in the pod that is behind.
func (s *syncs) status() []api.Synced {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []api.Synced
	for n, pair := range s.clone.cfg.Spec.Sync {
		shown := api.Synced{SyncPair: pair, Synced: len(s.running) > 0}
		for _, p := range s.running {
			if n >= len(p.sources) {
				continue
			}
			st := p.sources[n].Status()
			shown.Files = max(shown.Files, st.Files)
			shown.Synced = shown.Synced && st.Synced
			if st.LastAt.After(shown.Last) {
				shown.Last = st.LastAt
			}
			shown.LastError = cmp.Or(shown.LastError, trouble(st))
		}
		all = append(all, shown)
	}
	return all
}

// trouble is what keeps files from the container.
func trouble(st filesync.Status) string {
	switch {
	case st.Err != nil:
		return st.Err.Error()
	case st.Last.Err != nil:
		return st.Last.Err.Error()
	case len(st.Last.Failed) > 0:
		f := st.Last.Failed[0]
		text := f.Path + ": " + f.Err.Error()
		if more := len(st.Last.Failed) - 1; more > 0 {
			text += fmt.Sprintf(" (and %d more)", more)
		}
		return text
	}
	return ""
}
