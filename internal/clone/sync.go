package clone

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/pkg/filesync"
)

// syncLook is how often it is looked whether a pod has got its files.
const syncLook = 100 * time.Millisecond

// syncs are the files that go to each pod of a clone, from when its container runs until the pod goes. A container that was
// started again has the image's files, and gets all of them anew.
type syncs struct {
	clone     *Clone
	container string
	sent      atomic.Int64 // bytes, to all

	work sync.WaitGroup

	mu      sync.Mutex
	running map[types.UID]*podSync
}

// podSync is what goes to one pod. What is not said to be otherwise does not change.
type podSync struct {
	id      string // of the container
	cancel  context.CancelFunc
	sources []*filesync.Source // in the order of the specification's pairs

	// Guarded by syncs.mu:
	places []place // likewise
	copied bool    // the container had all files once
	ended  bool    // the container has, or another one runs in its place
}

// place is what is known of where a pair's files go in a pod.
type place struct {
	compared bool   // with the laptop's, in this container
	writable bool   // a file was written, in this container or in an earlier one of the pod
	refused  string // why not: no file was written, where some had to be
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
		n := slices.IndexFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Name == s.container })
		if n < 0 || p.DeletionTimestamp != nil {
			continue
		}
		status, last := p.Status.ContainerStatuses[n], s.running[p.UID]
		runs := status.State.Running != nil
		there[p.UID] = runs || last != nil
		if last != nil && (!runs || last.id != status.ContainerID) {
			last.cancel()
			last.ended = true
		}
		if !runs || last != nil && !last.ended {
			continue
		}
		places := make([]place, len(s.clone.cfg.Spec.Sync))
		if last != nil {
			for n := range places {
				places[n].writable = last.places[n].writable
			}
		}
		s.running[p.UID] = s.begin(ctx, p.Namespace, p.Name, status.ContainerID, places)
	}
	for uid, p := range s.running {
		if !there[uid] {
			p.cancel()
			delete(s.running, uid)
		}
	}
}

func (s *syncs) begin(ctx context.Context, namespace, pod, id string, places []place) *podSync {
	ctx, cancel := context.WithCancel(ctx)
	p := &podSync{id: id, cancel: cancel, places: places}
	for n, pair := range s.clone.cfg.Spec.Sync {
		log := s.clone.log.With("pod", pod, "local", pair.Local, "remote", pair.Remote)
		source, err := filesync.NewSource(filesync.SourceConfig{
			Dir: pair.Local, Logger: log,
			Dial: func(context.Context) (net.Conn, error) {
				conn := s.clone.cfg.Cluster.DialExec(namespace, pod, s.container, []string{api.SupervisorProgram, "sync", strconv.Itoa(n)})
				return &counted{conn, &s.sent}, nil
			},
			OnSync: func(b filesync.Batch) {
				log.Info("files synced", "written", b.Files, "removed", b.Removed, "bytes", b.Bytes, "took", b.Took, "failed", len(b.Failed))
				s.learn(&p.places[n], b)
			},
		})
		if err != nil { // only what the code gives it can be wrong
			log.Error("syncing files", "err", err)
			p.places[n].refused = err.Error()
			p.sources = append(p.sources, nil)
			continue
		}
		p.sources = append(p.sources, source)
		s.work.Go(func() {
			if err := source.Run(ctx); err != nil {
				log.Error("no files are synced any more", "err", err)
			}
		})
	}
	s.work.Go(func() { s.await(ctx, p) })
	return p
}

// learn takes over what a round says of the place where it went.
func (s *syncs) learn(at *place, b filesync.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at.compared = at.compared || b.Compared
	at.writable = at.writable || b.Files > 0
	switch {
	case at.writable:
		at.refused = ""
	case b.Refused > 0:
		at.refused = failures(b)
	}
}

// await has the clone's pods be looked at again once one of them has all files.
func (s *syncs) await(ctx context.Context, p *podSync) {
	look := time.NewTicker(syncLook)
	defer look.Stop()
	for {
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		all := true
		for n := range p.sources {
			all = all && p.has(n)
		}
		p.copied = all
		s.mu.Unlock()
		if all {
			s.clone.lookAgain()
			return
		}
	}
}

// has reports whether the pod has the files of a pair.
func (p *podSync) has(n int) bool {
	at := p.places[n]
	return at.compared && at.refused == "" && p.sources[n].Status().Synced
}

// lack is why a pod has not got the files of a pair.
type lack struct{ remote, why string } // why: empty while they are being copied

func (l lack) String() string {
	if l.why == "" {
		return "its files are being copied"
	}
	return l.remote + ": " + l.why
}

// lack is what a pod has to wait for before requests may go to it, or nil. It does not come back when files change.
func (s *syncs) lack(pod types.UID) *lack {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.running[pod]
	if len(s.clone.cfg.Spec.Sync) == 0 || p != nil && p.copied {
		return nil
	}
	if p != nil {
		for n, pair := range s.clone.cfg.Spec.Sync {
			if why := p.trouble(n); why != "" && !p.has(n) {
				return &lack{pair.Remote, why}
			}
		}
	}
	return &lack{}
}

// counted is a connection whose written bytes are counted.
type counted struct {
	net.Conn
	sent *atomic.Int64
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.sent.Add(int64(n))
	return n, err
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
			shown.Synced = shown.Synced && p.has(n)
			shown.LastError = cmp.Or(shown.LastError, p.trouble(n))
			if p.sources[n] == nil {
				continue
			}
			st := p.sources[n].Status()
			shown.Files = max(shown.Files, st.Files)
			if st.LastAt.After(shown.Last) {
				shown.Last = st.LastAt
			}
		}
		all = append(all, shown)
	}
	return all
}

// trouble is what keeps files of a pair from the container.
func (p *podSync) trouble(n int) string {
	if why := p.places[n].refused; why != "" {
		return why
	}
	st := p.sources[n].Status()
	switch {
	case st.Err != nil:
		return st.Err.Error()
	case st.Last.Err != nil:
		return st.Last.Err.Error()
	}
	return failures(st.Last)
}

// failures are those of a round, or "".
func failures(b filesync.Batch) string {
	if len(b.Failed) == 0 {
		return ""
	}
	text := b.Failed[0].Path + ": " + b.Failed[0].Err.Error()
	if more := len(b.Failed) - 1; more > 0 {
		text += fmt.Sprintf(" (and %d more)", more)
	}
	return text
}
