package clone

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

const (
	leaveTimeout  = 5 * time.Second // for the Job's deletion to be accepted
	retryPause    = time.Second     // after a request about the Job that failed
	conflictPause = 50 * time.Millisecond
	goneTimeout   = 45 * time.Second           // for an earlier Job of that name to be gone, its pods' grace included
	seenAlive     = renewEvery + 5*time.Second // in which who lives renews a clone
)

// Cluster is what a clone does with the cluster, with the user's own rights: a *cluster.Cluster.
type Cluster interface {
	Workload(ctx context.Context, namespace, typeAndName string) (*cluster.Workload, error)
	DialExec(namespace, pod, container string, command []string) net.Conn
	WatchPods(ctx context.Context, w *cluster.Workload, f func([]corev1.Pod)) error
	Kube() kubernetes.Interface
	Explain(err error) *api.Error
}

// Config is what New needs.
type Config struct {
	Cluster   Cluster
	Namespace string // the workload's
	Workload  string // TYPE/NAME
	Spec      api.CloneSpec
	Image     func(context.Context) (string, error) // the traffic manager's, which has the supervisor in it
	Owner     string                                // user@host
	Key       string                                // the hash of the owner's public key
	OnPods    func([]api.ClonePod)                  // whenever they have changed; calls do not overlap
	Progress  func(api.Event)                       // may be called concurrently; never blocks for long
	Logger    *slog.Logger
}

// Clone is one copy. Run is called once; the other methods may be called at any time, concurrently.
//
//	Run ─▶ create ─▶ watch its pods ─▶ (ctx ends, or somebody deleted it) ─▶ delete
//	          ▲        renew its lease
//	          └───────── the Job is gone: the laptop slept longer than the lease, or the program ended well
type Clone struct {
	cfg  Config
	kube kubernetes.Interface
	log  *slog.Logger

	ends  bool // of run: what it runs is meant to end
	syncs syncs

	ended chan struct{} // a pod has ended well; buffered 1
	again chan struct{} // the pods are to be looked at once more: files have come, or the Job is another one; buffered 1
	ready chan struct{} // closed: a pod is ready, and has the files that go to it, or has done what it is for
	first sync.Once
	begun chan struct{} // closed: and its maker has been told of all that was on the way

	renewEvery  time.Duration
	syncTrouble time.Duration // tests have less patience

	mu        sync.Mutex
	status    api.Clone
	unrenewed string       // why the lease could not be renewed, the last time
	over      bool         // a pod of the Job ended well, and the Job may have
	uid       types.UID    // the Job's
	pods      []corev1.Pod // the Job's; not changed, but replaced
}

// New makes a clone that does not run yet.
func New(cfg Config) *Clone {
	c := &Clone{
		cfg: cfg, kube: cfg.Cluster.Kube(), log: cfg.Logger.With("clone", cfg.Workload),
		ended: make(chan struct{}, 1), again: make(chan struct{}, 1), ready: make(chan struct{}), begun: make(chan struct{}),
		renewEvery: renewEvery, syncTrouble: syncTrouble,
		status: api.Clone{Namespace: cmp.Or(cfg.Spec.Namespace, cfg.Namespace), State: api.CloneStarting, NoTraffic: cfg.Spec.NoTraffic},
	}
	c.syncs = syncs{clone: c, running: map[types.UID]*podSync{}}
	return c
}

// Begun is closed once a pod of the clone was ready and had the files that go to it.
func (c *Clone) Begun() <-chan struct{} { return c.begun }

// Status is a snapshot, also after Run has returned.
func (c *Clone) Status() api.Clone {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Pods, s.Notes, s.Ports = slices.Clone(s.Pods), slices.Clone(s.Notes), slices.Clone(s.Ports)
	if s.Pods == nil {
		s.Pods = []api.ClonePod{}
	}
	s.LastError = cmp.Or(s.LastError, c.unrenewed)
	s.Sync = c.syncs.status()
	return s
}

func (c *Clone) change(f func(*api.Clone)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.status)
}

// Run keeps the clone until ctx ends, which is not an error, or it cannot be had. It then deletes it. Errors are *api.Error.
func (c *Clone) Run(ctx context.Context) error {
	err := c.run(ctx)
	if ctx.Err() != nil {
		err = nil
	}
	if gone := c.remove(ctx); err == nil {
		err = gone
	}
	if err == nil {
		return nil // not a *api.Error that is nil
	}
	c.change(func(s *api.Clone) { s.State = api.CloneFailed })
	return c.explained(err)
}

func (c *Clone) explained(err error) *api.Error {
	if said := (*api.Error)(nil); errors.As(err, &said) {
		return said
	}
	return c.cfg.Cluster.Explain(err)
}

func (c *Clone) run(ctx context.Context) error {
	done := c.step("Looking at %s", c.cfg.Workload)
	w, err := c.cfg.Cluster.Workload(ctx, c.cfg.Namespace, c.cfg.Workload)
	if err != nil {
		return err
	}
	container, err := w.Container(c.cfg.Spec.Container)
	if err != nil {
		return err
	}
	namespace := cmp.Or(c.cfg.Spec.Namespace, w.Namespace)
	s, notes, err := read(ctx, c.kube, w, container.Name, namespace)
	if err != nil {
		return err
	}
	job, more, err := s.job(c.cfg.Spec, c.cfg.Owner, c.cfg.Key)
	if err != nil {
		return err
	}
	c.ends = s.ends()
	if supervised(c.cfg.Spec) {
		if err := c.supervise(ctx, job, container.Name); err != nil {
			return err
		}
	}
	c.syncs.container = container.Name
	notes = append(notes, more...)
	done("container %s", container.Name)
	for _, note := range notes {
		c.cfg.Progress(api.Event{Time: time.Now(), Warning: note})
	}
	c.change(func(s *api.Clone) { s.Name, s.Notes = job.Name, notes })

	created := c.step("Creating the clone %s", job.Name)
	own := service(job, w.Ports())
	live, without, err := c.create(ctx, job, own)
	if err != nil {
		return err
	}
	if without == "" {
		host := own.Name + "." + own.Namespace
		c.change(func(s *api.Clone) { s.Host, s.Ports = host, hostPorts(own) })
		created("%s", host)
	} else {
		note := "the clone has no name in DNS: " + string(without)
		c.cfg.Progress(api.Event{Time: time.Now(), Warning: note})
		c.change(func(s *api.Clone) { s.Notes = append(s.Notes, note) })
		created("namespace %s", namespace)
	}
	g, gctx := errgroup.WithContext(ctx)
	pods := make(chan []corev1.Pod)
	g.Go(func() error { return c.keep(gctx, job, live, own) })
	g.Go(func() error { return c.see(gctx, pods) })
	g.Go(func() error {
		return c.cfg.Cluster.WatchPods(gctx, &cluster.Workload{
			Namespace: namespace, Name: job.Name, Kind: "Job", Resource: batchv1.SchemeGroupVersion.WithResource("jobs"),
			Selector: labels.SelectorFromSet(labels.Set{labelClone: job.Name}),
		}, func(now []corev1.Pod) {
			select {
			case pods <- now:
			case <-gctx.Done():
			}
		})
	})
	g.Go(func() error { return c.await(gctx, job.Name) })
	err = g.Wait()
	c.syncs.wait()
	return err
}

// step tells of something that may take a while; the function that it returns tells of its end.
func (c *Clone) step(format string, args ...any) (done func(format string, args ...any)) {
	what := fmt.Sprintf(format, args...)
	c.cfg.Progress(api.Event{Time: time.Now(), Step: what})
	return func(format string, args ...any) {
		c.cfg.Progress(api.Event{Time: time.Now(), Step: what, Detail: fmt.Sprintf(format, args...), Done: true})
	}
}

// create makes the Job and its Service, or says why there is none.
func (c *Clone) create(ctx context.Context, job *batchv1.Job, own *corev1.Service) (*batchv1.Job, nameless, error) {
	live, err := c.createJob(ctx, job)
	if err != nil {
		return nil, "", err
	}
	c.mu.Lock()
	c.over, c.uid = false, live.UID
	c.mu.Unlock()
	c.lookAgain() // its pods may have been there before this was known
	without, err := c.name(ctx, own, live)
	return live, without, err
}

// createJob makes the Job. One of the same name that an earlier daemon of the owner's left is removed first.
func (c *Clone) createJob(ctx context.Context, job *batchv1.Job) (*batchv1.Job, error) {
	jobs := c.kube.BatchV1().Jobs(job.Namespace)
	live, err := jobs.Create(ctx, job, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return live, err
	}
	there, err := jobs.Get(ctx, job.Name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	if err == nil {
		owner := there.Annotations[annotationOwner]
		switch {
		case there.Labels[labelManagedBy] != managedBy || owner == "":
			return nil, api.Errorf(api.ExitConflict, "the namespace %s has a Job %s already, which is no clone", job.Namespace, job.Name).
				WithHint("Take another name: --name NAME")
		case owner != c.cfg.Owner, there.Annotations[annotationWorkload] != job.Annotations[annotationWorkload]:
			return nil, taken(there, owner)
		case there.Annotations[annotationKey] != c.cfg.Key:
			if err := c.abandoned(ctx, there); err != nil {
				return nil, err
			}
		}
		if err := remove(ctx, c.kube, job.Namespace, job.Name, there.UID); err != nil {
			return nil, err
		}
	}
	gone, cancel := context.WithTimeout(ctx, goneTimeout)
	defer cancel()
	for {
		live, err := jobs.Create(gone, job, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return live, err
		}
		if err := pause(gone, retryPause); err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, api.Errorf(api.ExitNotReady, "the earlier clone %s does not go away", job.Name)
		}
	}
}

// taken says who has a clone.
func taken(by *batchv1.Job, owner string) *api.Error {
	return api.Errorf(api.ExitConflict, "the namespace %s has a clone %s of %s already: %s has had it since %s", by.Namespace, by.Name,
		by.Annotations[annotationWorkload], owner, by.CreationTimestamp.Local().Format(time.DateTime)).
		WithHint("Take another name: --name NAME")
}

// abandoned waits until it is clear that nobody renews a clone, and gives an error if somebody does: there may be another machine of
// the same name, with a user of the same name.
func (c *Clone) abandoned(ctx context.Context, there *batchv1.Job) error {
	done := c.step("Waiting for a daemon that had the clone %s already", there.Name)
	now := there
	for began := time.Now(); !finished(now) && time.Since(began) < seenAlive; {
		if err := pause(ctx, retryPause); err != nil {
			return err
		}
		var err error
		now, err = c.kube.BatchV1().Jobs(there.Namespace).Get(ctx, there.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && now.UID != there.UID:
			done("the clone has gone") // what has come in its place is seen by whoever makes the next one
			return nil
		case err != nil:
			return err
		case deadline(now) != deadline(there):
			return taken(there, "another "+there.Annotations[annotationOwner])
		}
	}
	done("it is gone")
	return nil
}

// deadline is the age at which a Job ends, in seconds; 0: it has none.
func deadline(j *batchv1.Job) int64 {
	if j.Spec.ActiveDeadlineSeconds == nil {
		return 0
	}
	return *j.Spec.ActiveDeadlineSeconds
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// see takes over the Job's pods as they change, and when they have got their files.
func (c *Clone) see(ctx context.Context, pods <-chan []corev1.Pod) error {
	for now := []corev1.Pod(nil); ; {
		select {
		case now = <-pods:
		case <-c.again:
		case <-ctx.Done():
			return ctx.Err()
		}
		c.mu.Lock()
		job := c.uid
		c.mu.Unlock()
		var own []corev1.Pod // and not an earlier Job's of the same name
		for _, p := range now {
			if owner := metav1.GetControllerOf(&p); owner != nil && owner.UID == job {
				own = append(own, p)
			}
		}
		c.syncs.follow(ctx, own)
		c.look(own)
	}
}

func (c *Clone) lookAgain() {
	select {
	case c.again <- struct{}{}:
	default:
	}
}

// look takes over what is known of the clone's pods.
func (c *Clone) look(pods []corev1.Pod) {
	var list []api.ClonePod
	ready, ended, trouble := 0, 0, ""
	for _, p := range pods {
		if p.Status.Phase == corev1.PodSucceeded {
			ended++ // for the Job too, also one that was deleted, or evicted, and ended well for that
			continue
		}
		if p.DeletionTimestamp != nil {
			continue
		}
		if p.Status.Phase == corev1.PodFailed {
			if c.ends { // the Job tries again with another pod
				failed, _ := reason(&p)
				trouble = cmp.Or(trouble, failed)
			}
			continue
		}
		shown := api.ClonePod{Name: p.Name, IP: p.Status.PodIP}
		if podutils.IsPodReady(&p) {
			missing := c.syncs.lack(p.UID)
			if shown.Ready = missing == nil; missing != nil {
				shown.Reason = missing.String()
			}
		} else {
			shown.Reason, _ = reason(&p)
		}
		if shown.Ready {
			ready++
		}
		trouble = cmp.Or(trouble, shown.Reason)
		list = append(list, shown)
	}
	c.mu.Lock()
	done := c.status.State == api.CloneDone || c.ends && ended >= int(max(c.cfg.Spec.Replicas, 1))
	c.over = c.over || ended > 0
	c.status.Pods, c.pods = list, pods
	switch {
	case c.status.State == api.CloneLeaving || c.status.State == api.CloneFailed:
	case done:
		c.status.State, c.status.LastError = api.CloneDone, ""
	case ready > 0:
		c.status.State, c.status.LastError = api.CloneRunning, ""
	case c.status.State != api.CloneStarting || trouble != "":
		if c.status.State != api.CloneStarting {
			c.status.State = api.CloneWaiting
		}
		c.status.LastError = cmp.Or(trouble, c.status.LastError)
	}
	c.mu.Unlock()
	if c.cfg.OnPods != nil {
		c.cfg.OnPods(slices.Clone(list))
	}
	if ended > 0 {
		select {
		case c.ended <- struct{}{}:
		default:
		}
	}
	if ready > 0 || done {
		c.first.Do(func() { close(c.ready) }) // who waits for it finds them told
	}
}

// remove deletes the Job, and its pods and its name with it.
func (c *Clone) remove(ctx context.Context) error {
	c.change(func(s *api.Clone) { s.State = api.CloneLeaving })
	status := c.Status()
	if status.Name == "" {
		return nil // none was made
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	live, err := c.kube.BatchV1().Jobs(status.Namespace).Get(ctx, status.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err == nil && live.Annotations[annotationKey] != c.cfg.Key {
		return nil // somebody else's
	}
	if err == nil {
		err = remove(ctx, c.kube, status.Namespace, status.Name, live.UID)
	}
	if err != nil {
		return fmt.Errorf("deleting the clone %s, which ends by itself %v after its last renewal: %w", status.Name, lease, err)
	}
	return nil
}

// remove deletes a Job, if it is still that one.
func remove(ctx context.Context, kube kubernetes.Interface, namespace, name string, uid types.UID) error {
	err := kube.BatchV1().Jobs(namespace).Delete(ctx, name, metav1.DeleteOptions{
		PropagationPolicy: new(metav1.DeletePropagationBackground), Preconditions: &metav1.Preconditions{UID: &uid},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another one
	}
	return err
}

// RemoveLeft deletes the clones that there are of a workload, TYPE/NAME, of one owner (user@host), or of everybody (""), and gives
// their names. It is for those whose daemon is gone: one that lives sees that somebody deleted its clone, and ends what belongs to it.
func RemoveLeft(ctx context.Context, kube kubernetes.Interface, namespace, workload, owner string) ([]string, error) {
	all, err := left(ctx, kube, metav1.NamespaceAll) // clones may be elsewhere: --target-namespace
	if apierrors.IsForbidden(err) {
		all, err = left(ctx, kube, namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("listing clones: %w", err)
	}
	var removed []string
	var errs []error
	for _, j := range all {
		if j.DeletionTimestamp != nil || j.Annotations[annotationWorkload] != namespace+"/"+workload || owner != "" && j.Annotations[annotationOwner] != owner {
			continue
		}
		if err := remove(ctx, kube, j.Namespace, j.Name, j.UID); err != nil {
			errs = append(errs, fmt.Errorf("deleting the clone %s in the namespace %s: %w", j.Name, j.Namespace, err))
			continue
		}
		removed = append(removed, j.Name)
	}
	return removed, errors.Join(errs...)
}

func left(ctx context.Context, kube kubernetes.Interface, namespace string) ([]batchv1.Job, error) {
	list, err := kube.BatchV1().Jobs(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: labels.Set{labelManagedBy: managedBy}.String() + "," + labelClone,
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}
