package clone

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
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
	readyPatience = 2 * time.Minute // for the first pod
	leaveTimeout  = 5 * time.Second // for the Job's deletion to be accepted
	retryPause    = time.Second     // after a request about the Job that failed
	conflictPause = 50 * time.Millisecond
	syncTrouble   = 10 * time.Second // for which no file reaches the first pod, until that counts as for good
	syncLook      = 100 * time.Millisecond
	endLooks      = 10               // at the Job, retryPause apart, after one of its pods has ended
	goneTimeout   = 45 * time.Second // for an earlier Job of that name to be gone, its pods' grace included
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
	ready chan struct{} // closed: a pod is ready, or has done what it is for
	first sync.Once
	begun chan struct{} // closed: and it has the files

	renewEvery  time.Duration
	syncTrouble time.Duration // tests have less patience

	mu     sync.Mutex
	status api.Clone
	failed string // what keeps the first pod from starting, for good as far as is known
	over   bool   // a pod of the Job ended well, and the Job may have
	uid    types.UID
}

// New makes a clone that does not run yet.
func New(cfg Config) *Clone {
	c := &Clone{
		cfg: cfg, kube: cfg.Cluster.Kube(), log: cfg.Logger.With("clone", cfg.Workload),
		ended: make(chan struct{}, 1), ready: make(chan struct{}), begun: make(chan struct{}), renewEvery: renewEvery, syncTrouble: syncTrouble,
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
	if len(c.cfg.Spec.Sync) > 0 || c.cfg.Spec.Restart {
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
	g.Go(func() error { return c.keep(gctx, job, live, own) })
	g.Go(func() error {
		return c.cfg.Cluster.WatchPods(gctx, &cluster.Workload{
			Namespace: namespace, Name: job.Name, Kind: "Job", Resource: batchv1.SchemeGroupVersion.WithResource("jobs"),
			Selector: labels.SelectorFromSet(labels.Set{labelClone: job.Name}),
		}, func(pods []corev1.Pod) {
			c.syncs.follow(gctx, pods)
			c.look(pods)
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
			return nil, api.Errorf(api.ExitConflict, "the namespace %s has a clone %s of %s already: %s has had it since %s", job.Namespace, job.Name,
				there.Annotations[annotationWorkload], owner, there.CreationTimestamp.Local().Format(time.DateTime)).
				WithHint("Take another name: --name NAME")
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

// keep moves the Job's deadline ahead, and makes the Job again when it is gone, unless somebody deleted it, who will have had a
// reason.
func (c *Clone) keep(ctx context.Context, job, live *batchv1.Job, own *corev1.Service) error {
	jobs := c.kube.BatchV1().Jobs(job.Namespace)
	began := time.Now().Round(0) // the clock of the wall, which goes on while the laptop sleeps
	renewed := began
	looks := 0 // for a Job that has ended, as one of its pods has
	for wait := c.renewEvery; ; {
		var ended <-chan struct{}
		if live != nil && time.Since(began) >= c.renewEvery { // a program that ends at once is not started all the time
			ended = c.ended
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ended:
			timer.Stop()
			looks = endLooks
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		wait = c.renewEvery
		if looks > 0 {
			looks--
			wait = retryPause
		}
		if c.isDone() {
			return nil // its end is Kubernetes' to see to
		}
		now := time.Now().Round(0)
		if live == nil {
			again, _, err := c.create(ctx, job, own)
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case err == nil:
				live, began, renewed, looks = again, now, now, 0
				wait = c.renewEvery
			case lasting(err):
				return err
			default:
				c.log.Warn("making the clone again", "err", err)
				wait = retryPause
			}
			continue
		}
		deadline := int64((now.Sub(began) + lease) / time.Second)
		patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"activeDeadlineSeconds":%d}}`, live.UID, deadline)
		there, err := jobs.Patch(ctx, job.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		gone := apierrors.IsNotFound(err) || apierrors.IsConflict(err) // Conflict: another one has its name
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && !finished(there):
			renewed = now
		case c.isDone(): // it may have come to its end meanwhile
		case (gone || err == nil && there.DeletionTimestamp != nil) && (now.Sub(renewed) < kept || now.Sub(renewed) < lease && !c.isOver()):
			return api.Errorf(api.ExitLost, "somebody deleted the clone %s in the namespace %s", job.Name, job.Namespace).
				WithHint("`kubevpn clone` makes it again.")
		case err == nil, gone, apierrors.IsInvalid(err):
			c.log.Warn("the clone is gone; making it again", "err", err)
			c.change(func(s *api.Clone) {
				s.State, s.LastError = api.CloneStarting, "its lease ran out, or its program ended; it is made again"
			})
			live, wait = nil, 0
		default:
			c.log.Warn("renewing the clone's lease", "err", err)
			wait = retryPause
		}
	}
}

// lasting reports whether trying again does not help: errors of ours are about what is there, and others about rights.
func lasting(err error) bool {
	said := (*api.Error)(nil)
	return errors.As(err, &said) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err)
}

func (c *Clone) isDone() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status.State == api.CloneDone
}

func (c *Clone) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

func finished(j *batchv1.Job) bool {
	return j.DeletionTimestamp != nil || slices.ContainsFunc(j.Status.Conditions, func(c batchv1.JobCondition) bool {
		return c.Status == corev1.ConditionTrue && (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed || c.Type == batchv1.JobFailureTarget || c.Type == batchv1.JobSuccessCriteriaMet)
	})
}

// look takes over what is known of the clone's pods.
func (c *Clone) look(pods []corev1.Pod) {
	var list []api.ClonePod
	ready, ended, failed, trouble := 0, 0, "", ""
	c.mu.Lock()
	current := c.uid
	c.mu.Unlock()
	for _, p := range pods {
		if owner := metav1.GetControllerOf(&p); p.Status.Phase == corev1.PodSucceeded && (owner == nil || owner.UID == current) {
			ended++ // for the Job too, also one that was deleted, or evicted, and ended well for that
		}
		if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded {
			continue
		}
		if p.Status.Phase == corev1.PodFailed {
			if c.ends { // the Job tries again with another pod
				failed, _ = reason(&p)
				trouble = cmp.Or(trouble, failed)
			}
			continue
		}
		shown := api.ClonePod{Name: p.Name, IP: p.Status.PodIP, Ready: podutils.IsPodReady(&p)}
		if shown.Ready {
			ready++
		} else {
			var final bool
			shown.Reason, final = reason(&p)
			trouble = cmp.Or(trouble, shown.Reason)
			if final {
				failed = shown.Reason
			}
		}
		list = append(list, shown)
	}
	c.mu.Lock()
	done := c.status.State == api.CloneDone || c.ends && ended >= int(max(c.cfg.Spec.Replicas, 1))
	c.failed = failed
	c.over = c.over || ended > 0
	c.status.Pods = list
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

// reason is why a pod is not ready; final reports that waiting does not help.
func reason(p *corev1.Pod) (text string, final bool) {
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
			text := s.Name + ": " + w.Reason
			if w.Message != "" {
				text += ": " + w.Message
			}
			return text, slices.Contains([]string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError", "CrashLoopBackOff"}, w.Reason)
		}
		if t := s.State.Terminated; t != nil && t.ExitCode != 0 {
			return fmt.Sprintf("%s ended with exit code %d (%s)", s.Name, t.ExitCode, t.Reason), false
		}
	}
	for _, condition := range p.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return strings.TrimSuffix(condition.Message, "."), condition.Reason == corev1.PodReasonUnschedulable
		}
	}
	return "", false
}

// await fails when the first pod does not become ready.
func (c *Clone) await(ctx context.Context, name string) error {
	done := c.step("Waiting for a pod of %s to be ready", name)
	patience := time.NewTimer(readyPatience)
	defer patience.Stop()
	look := time.NewTicker(retryPause)
	defer look.Stop()
	final := 0
	for {
		select {
		case <-c.ready:
			done("ready")
			if err := c.awaitFiles(ctx, name); err != nil {
				return err
			}
			close(c.begun)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-patience.C:
			c.mu.Lock()
			defer c.mu.Unlock()
			return api.Errorf(api.ExitNotReady, "no pod of the clone %s has become ready in %v: %s", name, readyPatience, cmp.Or(c.status.LastError, "its readiness probe fails")).
				WithHint("`kubectl -n %s logs job/%s` says what it says.", c.status.Namespace, name)
		case <-look.C:
			c.mu.Lock()
			failed, namespace := c.failed, c.status.Namespace
			c.mu.Unlock()
			if failed == "" {
				final = 0
				continue
			}
			if final++; final < 5 { // a Secret may come a moment later than the pod
				continue
			}
			code := api.ExitNotReady
			if strings.Contains(failed, "Image") {
				code = api.ExitImagePull
			}
			return api.Errorf(code, "the clone %s does not start: %s", name, failed).
				WithHint("`kubectl -n %s describe job/%s` has more.", namespace, name)
		}
	}
}

// awaitFiles waits until the first pods have the files that go to them: requests are for what the user has here.
func (c *Clone) awaitFiles(ctx context.Context, name string) error {
	if len(c.cfg.Spec.Sync) == 0 {
		return nil
	}
	done := c.step("Copying files to %s", name)
	look := time.NewTicker(syncLook)
	defer look.Stop()
	var since time.Time // when the trouble began
	for {
		if c.isDone() {
			return nil
		}
		all := c.syncs.status()
		behind := slices.IndexFunc(all, func(s api.Synced) bool { return !s.Synced })
		if behind < 0 {
			files := 0
			for _, s := range all {
				files += s.Files
				if s.LastError != "" {
					c.cfg.Progress(api.Event{Time: time.Now(), Warning: s.Remote + ": " + s.LastError})
				}
			}
			done("%d files and directories", files)
			return nil
		}
		trouble := all[behind].LastError
		if trouble == "" || since.IsZero() {
			since = time.Now()
		}
		if time.Since(since) >= c.syncTrouble {
			return api.Errorf(api.ExitNotReady, "no files reach %s of the clone %s: %s", all[behind].Remote, name, trouble).
				WithHint("The container's user has to be able to write there; docs/clone.md has more.")
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
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
