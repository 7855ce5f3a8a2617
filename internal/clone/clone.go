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
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

const (
	readyPatience = 2 * time.Minute  // for the first pod
	leaveTimeout  = 5 * time.Second  // for the Job's deletion to be accepted
	retryPause    = time.Second      // after a request about the Job that failed
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
//	Run ─▶ create ─▶ watch its pods ─▶ (ctx ends) ─▶ delete
//	          ▲        renew its lease
//	          └───────── the Job is gone: the laptop slept longer than the lease, or somebody deleted it
type Clone struct {
	cfg  Config
	kube kubernetes.Interface
	log  *slog.Logger

	workload *cluster.Workload // of run
	syncs    syncs

	begun chan struct{} // closed: a pod is ready
	first sync.Once

	renewEvery time.Duration

	mu     sync.Mutex
	status api.Clone
	failed string // what keeps the first pod from starting, for good as far as is known
}

// New makes a clone that does not run yet.
func New(cfg Config) *Clone {
	c := &Clone{
		cfg: cfg, kube: cfg.Cluster.Kube(), log: cfg.Logger.With("clone", cfg.Workload),
		begun: make(chan struct{}), renewEvery: renewEvery,
		status: api.Clone{Namespace: cmp.Or(cfg.Spec.Namespace, cfg.Namespace), State: api.CloneStarting},
	}
	c.syncs = syncs{clone: c, running: map[types.UID]*podSync{}}
	return c
}

// Begun is closed once a pod of the clone was ready.
func (c *Clone) Begun() <-chan struct{} { return c.begun }

// Status is a snapshot, also after Run has returned.
func (c *Clone) Status() api.Clone {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Pods, s.Notes = slices.Clone(s.Pods), slices.Clone(s.Notes)
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
	if len(c.cfg.Spec.Sync) > 0 || c.cfg.Spec.Restart {
		if err := c.supervise(ctx, job, container.Name); err != nil {
			return err
		}
	}
	c.workload, c.syncs.container = w, container.Name
	notes = append(notes, more...)
	done("container %s", container.Name)
	for _, note := range notes {
		c.cfg.Progress(api.Event{Time: time.Now(), Warning: note})
	}
	c.change(func(s *api.Clone) { s.Name, s.Notes = job.Name, notes })

	created := c.step("Creating the clone %s", job.Name)
	live, err := c.create(ctx, job)
	if err != nil {
		return err
	}
	created("namespace %s", namespace)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.keep(gctx, job, live) })
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

// create makes the Job. One of the same name that an earlier daemon of the owner's left is removed first.
func (c *Clone) create(ctx context.Context, job *batchv1.Job) (*batchv1.Job, error) {
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
		if err := c.delete(ctx, job.Namespace, job.Name, there.UID); err != nil {
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

// keep moves the Job's deadline ahead, and makes the Job again when it is gone.
func (c *Clone) keep(ctx context.Context, job, live *batchv1.Job) error {
	jobs := c.kube.BatchV1().Jobs(job.Namespace)
	began := time.Now().Round(0) // the clock of the wall, which goes on while the laptop sleeps
	for wait := c.renewEvery; ; {
		if err := pause(ctx, wait); err != nil {
			return err
		}
		wait = c.renewEvery
		deadline := int64((time.Now().Round(0).Sub(began) + lease) / time.Second)
		patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"activeDeadlineSeconds":%d}}`, live.UID, deadline)
		now, err := jobs.Patch(ctx, job.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && !finished(now):
			continue
		case err == nil, apierrors.IsNotFound(err), apierrors.IsConflict(err), apierrors.IsInvalid(err):
			c.log.Warn("the clone is gone; making it again", "err", err)
			c.change(func(s *api.Clone) {
				s.State, s.LastError = api.CloneStarting, "its lease ran out, or somebody deleted it; it was made again"
			})
			if live, err = c.create(ctx, job); err != nil {
				return err
			}
			began = time.Now().Round(0)
		default:
			c.log.Warn("renewing the clone's lease", "err", err)
			wait = retryPause
		}
	}
}

func finished(j *batchv1.Job) bool {
	return j.DeletionTimestamp != nil || slices.ContainsFunc(j.Status.Conditions, func(c batchv1.JobCondition) bool {
		return c.Status == corev1.ConditionTrue && (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed || c.Type == batchv1.JobFailureTarget || c.Type == batchv1.JobSuccessCriteriaMet)
	})
}

// look takes over what is known of the clone's pods.
func (c *Clone) look(pods []corev1.Pod) {
	var list []api.ClonePod
	ready, failed, trouble := 0, "", ""
	for _, p := range pods {
		if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
			continue
		}
		shown := api.ClonePod{Name: p.Name, IP: p.Status.PodIP}
		for _, condition := range p.Status.Conditions {
			shown.Ready = shown.Ready || condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue
		}
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
	c.failed = failed
	c.status.Pods = list
	switch {
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
	if ready > 0 {
		c.first.Do(func() { close(c.begun) }) // who waits for it finds them told
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
		case <-c.begun:
			c.change(func(s *api.Clone) {
				if s.State == api.CloneStarting {
					s.State = api.CloneRunning
				}
			})
			done("ready")
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

// remove deletes the Job, and its pods with it.
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
		err = c.delete(ctx, status.Namespace, status.Name, live.UID)
	}
	if err != nil {
		return fmt.Errorf("deleting the clone %s, which ends by itself %v after its last renewal: %w", status.Name, lease, err)
	}
	return nil
}

func (c *Clone) delete(ctx context.Context, namespace, name string, uid types.UID) error {
	err := c.kube.BatchV1().Jobs(namespace).Delete(ctx, name, metav1.DeleteOptions{
		PropagationPolicy: new(metav1.DeletePropagationBackground), Preconditions: &metav1.Preconditions{UID: &uid},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another one
	}
	return err
}

// Left are the Jobs of clones in a namespace that an owner has, whichever daemon made them.
func Left(ctx context.Context, kube kubernetes.Interface, namespace, owner string) ([]batchv1.Job, error) {
	list, err := kube.BatchV1().Jobs(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: fields.OneTermEqualSelector(labelManagedBy, managedBy).String() + "," + labelClone,
	})
	if err != nil {
		return nil, fmt.Errorf("listing clones: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(j batchv1.Job) bool { return j.Annotations[annotationOwner] != owner }), nil
}
