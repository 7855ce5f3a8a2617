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

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/internal/process/files"
	"kubevpn/pkg/wire/filesync"
)

// syncs copies files to each pod of a clone, from when its container runs until the pod is gone. A restarted container
// has the files of the image, and receives all files again.
type syncs struct {
	clone     *Clone
	container string
	sent      atomic.Int64 // bytes, to all pods

	work sync.WaitGroup

	mu      sync.Mutex
	running map[types.UID]*podSync
}

// podSync copies files to one pod.
type podSync struct {
	id      string // of the container
	cancel  context.CancelFunc
	sources []*filesync.Source // one for each pair of the specification

	// Guarded by syncs.mu:
	ends   []syncEnd // one for each pair
	copied bool      // the container had all files once
	ended  bool      // the container has ended
}

// syncEnd is the remote end of a pair in one pod.
type syncEnd struct {
	complete bool   // this container had all files
	writable bool   // a file was written, in this container or in an earlier one of the pod
	rejected string // why no file could be written, although there were some to write
}

// follow starts to copy to pods whose container runs, and stops for those that are gone.
func (s *syncs) follow(ctx context.Context, pods []corev1.Pod) {
	if len(s.clone.cfg.Spec.Sync) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	there := make(map[types.UID]bool)
	for _, p := range pods {
		n := slices.IndexFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			return c.Name == s.container
		})
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
		places := make([]syncEnd, len(s.clone.cfg.Spec.Sync))
		if last != nil {
			for n := range places {
				places[n].writable = last.ends[n].writable
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

// begin starts to copy to a container.
func (s *syncs) begin(ctx context.Context, namespace, pod, id string, places []syncEnd) *podSync {
	ctx, cancel := context.WithCancel(ctx)
	p := &podSync{id: id, cancel: cancel, ends: places}
	for n, pair := range s.clone.cfg.Spec.Sync {
		log := s.clone.log.With("pod", pod, "local", pair.Local, "remote", pair.Remote)
		source := filesync.NewSource(filesync.SourceConfig{
			Dir: pair.Local, Logger: log,
			Dial: func(ctx context.Context) (net.Conn, string, error) { return s.dial(ctx, namespace, pod, n) },
			OnSync: func(b filesync.Batch) {
				log.Info("files synced", "written", b.Files, "removed", b.Removed, "bytes", b.Bytes, "took", b.Took,
					"failed", len(b.Failed))
				s.synced(p, n, b)
			},
		})
		p.sources = append(p.sources, source)
		s.work.Go(func() { source.Run(ctx) })
	}
	return p
}

// dial reaches the directory of a pair in a container.
func (s *syncs) dial(ctx context.Context, namespace, pod string, pair int) (net.Conn, string, error) {
	conn := s.clone.cfg.Cluster.DialExec(namespace, pod, s.container,
		[]string{api.SupervisorProgram, "sync", strconv.Itoa(pair)})
	hello, err := files.ReadHello(ctx, conn)
	switch {
	case err != nil:
		err = fmt.Errorf("cannot connect to the other end of the file sync: %w", err)
	case hello.Error != "":
		err = fmt.Errorf("at the other end: %s", api.CleanLine(hello.Error))
	}
	if err != nil {
		conn.Close()
		return nil, "", err
	}
	return &counted{conn, &s.sent}, hello.Name, nil
}

// synced records the result of a round, and wakes the clone when a pod first has all files.
func (s *syncs) synced(p *podSync, n int, b filesync.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := &p.ends[n]
	at.complete = at.complete || b.Complete
	at.writable = at.writable || b.Files > 0
	switch {
	case at.writable:
		at.rejected = ""
	case b.Rejected > 0:
		at.rejected = failures(b)
	}
	if !p.copied && !slices.ContainsFunc(p.ends, func(at syncEnd) bool { return !at.has() }) {
		p.copied = true
		s.clone.again.Raise()
	}
}

// has reports whether the files are there.
func (at syncEnd) has() bool { return at.complete && at.rejected == "" }

// missingFiles means that a pod does not have all files.
type missingFiles struct {
	remote string // where they go
	reason string // empty while they are being copied
}

func (m missingFiles) String() string {
	if m.reason == "" {
		return "copying its files"
	}
	return m.remote + ": " + m.reason
}

// missing returns the files that a pod must receive before requests may go to it, or nil. Later changes do not count.
func (s *syncs) missing(pod types.UID) *missingFiles {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.running[pod]
	if len(s.clone.cfg.Spec.Sync) == 0 || p != nil && p.copied {
		return nil
	}
	if p != nil {
		for n, pair := range s.clone.cfg.Spec.Sync {
			if why := p.trouble(n); why != "" && !p.ends[n].has() {
				return &missingFiles{pair.Remote, why}
			}
		}
	}
	return &missingFiles{}
}

// counted counts the bytes that are written to a connection.
type counted struct {
	net.Conn
	sent *atomic.Int64
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.sent.Add(int64(n))
	return n, err
}

// wait stops all copying and waits for its end. The context of follow has ended.
func (s *syncs) wait() {
	s.mu.Lock()
	for _, p := range s.running {
		p.cancel()
	}
	s.mu.Unlock()
	s.work.Wait()
}

// status describes each pair. If several pods run, the one that is behind counts.
func (s *syncs) status() []api.Synced {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []api.Synced
	for n, pair := range s.clone.cfg.Spec.Sync {
		shown := api.Synced{SyncPair: pair, Synced: len(s.running) > 0}
		for _, p := range s.running {
			st := p.sources[n].Status()
			shown.Synced = shown.Synced && p.ends[n].has() && st.Synced
			shown.LastError = cmp.Or(shown.LastError, p.trouble(n))
			shown.Files = max(shown.Files, st.Files)
			if st.LastAt.After(shown.Last) {
				shown.Last = st.LastAt
			}
		}
		all = append(all, shown)
	}
	return all
}

// trouble returns why files of a pair do not reach the container, or "".
func (p *podSync) trouble(n int) string {
	if why := p.ends[n].rejected; why != "" {
		return why
	}
	st := p.sources[n].Status()
	if st.Err != nil {
		return st.Err.Error()
	}
	return failures(st.Last)
}

// failures describes the failures of a round. It returns "" if there are none.
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
