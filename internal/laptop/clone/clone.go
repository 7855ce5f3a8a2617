package clone

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubectl/pkg/util/podutils"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
)

const (
	leaveTimeout  = 5 * time.Second // for the request to delete the Job
	retryPause    = time.Second     // after a failed request for the Job
	conflictPause = 50 * time.Millisecond
	// deletionTimeout limits the wait for the end of an earlier Job of that name, with the grace period of its pods.
	deletionTimeout = 45 * time.Second
	aliveTimeout    = renewEvery + 5*time.Second // a running daemon renews its clone within this time
)

// Cluster is the cluster, with the user's own permissions: a workloads.Client.
type Cluster interface {
	Workload(ctx context.Context, namespace, typeAndName string) (*workloads.Workload, error)
	DialExec(namespace, pod, container string, command []string) net.Conn
	WatchPods(ctx context.Context, w *workloads.Workload, f func([]corev1.Pod)) error
	Kube() kubernetes.Interface
	Dynamic() dynamic.Interface
	Explain(err error) *api.Error
}

// Config is the configuration of a Clone.
type Config struct {
	Cluster   Cluster
	Namespace string // of the workload
	Workload  string // TYPE/NAME
	Spec      api.CloneSpec
	Objects   api.Objects // labels and annotations of the objects
	// Make returns what runs in place of a copy of Workload, which need not exist. Nil: a copy.
	Make  func(image string) (Made, error)
	Image func(context.Context) (string, error) // of the traffic manager; it contains the supervisor
	// NeedsPullSecret reports whether the manager's own pod needs a Secret to pull Image. Nil: not checked.
	NeedsPullSecret func(context.Context) (bool, error)
	Owner           string               // user@host
	Key             string               // the hash of the owner's public key
	OnPods          func([]api.ClonePod) // after each change; calls do not overlap
	Progress        func(api.Event)      // may be called concurrently; never blocks for long
	Logger          *slog.Logger
}

// Clone is one copy of a workload. Call Run once. The other methods are safe for concurrent use, at any time.
//
//	Run ─▶ create ─▶ watch its pods ─▶ (ctx ends, or somebody deleted it) ─▶ delete
//	          ▲        renew its lease
//	          └───────── the Job is gone: the laptop slept longer than the lease, or the program ended well
type Clone struct {
	cfg  Config
	kube kubernetes.Interface
	log  *slog.Logger

	registry http.RoundTripper // to registries

	ends     bool                // the pods are expected to end; run sets it
	workload *workloads.Workload // set by plan
	recorded bool                // the API server has accepted an Event about the begin; set by run
	syncs    syncs

	ended wakeup.Signal      // a pod has succeeded
	again wakeup.Signal      // files arrived, or the Job or its pods have changed: update the pods
	ready context.Context    // ends when a pod is ready and has its files, or has succeeded
	begin context.CancelFunc // ends ready
	begun chan struct{}      // closed after ready, when Progress has received all events of the start

	lease, renewEvery time.Duration
	syncGrace         time.Duration // shorter in tests

	mu        sync.Mutex
	status    api.Clone
	unrenewed string       // why the last renewal of the lease failed
	over      bool         // a pod of the Job has succeeded, and perhaps the Job
	uid       types.UID    // of the Job
	listed    []corev1.Pod // as the API server lists them, also those of an earlier Job
	pods      []corev1.Pod // of the Job; replaced, never changed
}

// New returns a clone that does not run yet.
func New(cfg Config) *Clone {
	c := &Clone{
		cfg: cfg, kube: cfg.Cluster.Kube(), log: cfg.Logger.With("clone", cfg.Workload),
		ended: wakeup.NewSignal(), again: wakeup.NewSignal(),
		begun:    make(chan struct{}),
		registry: remote.DefaultTransport, lease: lease, renewEvery: renewEvery, syncGrace: syncGrace,
		status: api.Clone{Namespace: cmp.Or(cfg.Spec.Namespace, cfg.Namespace), State: api.CloneStarting,
			NoTraffic: cfg.Spec.NoTraffic},
	}
	if cfg.Make != nil {
		c.lease = madeLease
	}
	c.ready, c.begin = context.WithCancel(context.Background())
	c.syncs = syncs{clone: c, running: map[types.UID]*podSync{}}
	return c
}

// Begun is closed once a pod of the clone was ready and had its files.
func (c *Clone) Begun() <-chan struct{} { return c.begun }

// Status returns a snapshot of the clone's state, also after Run has returned.
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

// Run creates the clone, keeps it until ctx ends or it fails, and deletes it. The end of ctx is no error. Errors are
// *api.Error.
func (c *Clone) Run(ctx context.Context) error {
	err := c.run(ctx)
	if ctx.Err() != nil {
		err = nil
	}
	if gone := c.remove(ctx); err == nil {
		err = gone
	}
	if c.recorded {
		c.recorder().Record(context.WithoutCancel(ctx), "CloneEnded", "no longer runs the clone %s of %s",
			c.Status().Name, c.workload)
	}
	if err == nil {
		return nil // not a *api.Error that is nil
	}
	c.change(func(s *api.Clone) { s.State = api.CloneFailed })
	return c.cfg.Cluster.Explain(err)
}

func (c *Clone) run(ctx context.Context) error {
	plan := c.plan
	if c.cfg.Make != nil {
		plan = c.planMade
	}
	job, own, err := plan(ctx)
	if err != nil {
		return err
	}
	created := c.step("Creating the %s %s", c.kind(), job.Name)
	live, without, err := c.create(ctx, job, own)
	if err != nil {
		return err
	}
	if without != "" && c.cfg.Make != nil {
		return api.Errorf(api.ExitPermission, "cannot make a Service: %s", without)
	}
	if without == "" {
		created("%s", own.Name+"."+own.Namespace)
	} else {
		note := "the clone has no name in DNS: " + string(without)
		c.cfg.Progress(api.Event{Time: time.Now(), Warning: note})
		c.change(func(s *api.Clone) { s.Notes = append(s.Notes, note) })
		created("namespace %s", job.Namespace)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.keep(gctx, job, live, own) })
	g.Go(func() error { return c.follow(gctx) })
	g.Go(func() error { return c.watch(gctx, job) })
	g.Go(func() error {
		if err := c.await(gctx, job.Name); err != nil {
			return err
		}
		if c.workload == nil {
			return nil
		}
		c.recorded = c.recorder().Record(gctx, "CloneBegan", "runs the clone %s of %s in the namespace %s", job.Name,
			c.workload, job.Namespace)
		return nil
	})
	err = g.Wait()
	c.syncs.wait()
	return err
}

// plan reads the workload. It returns the Job of the clone and its Service, and publishes its notes.
func (c *Clone) plan(ctx context.Context) (*batchv1.Job, *corev1.Service, error) {
	done := c.step("Looking at %s", c.cfg.Workload)
	w, err := c.cfg.Cluster.Workload(ctx, c.cfg.Namespace, c.cfg.Workload)
	if err != nil {
		return nil, nil, err
	}
	container, err := w.Container(c.cfg.Spec.Container)
	if err != nil {
		return nil, nil, err
	}
	s, notes, err := read(ctx, c.kube, w, container.Name, cmp.Or(c.cfg.Spec.Namespace, w.Namespace))
	if err != nil {
		return nil, nil, err
	}
	job, more, err := s.job(c.cfg.Spec, c.cfg.Owner, c.cfg.Key)
	if err != nil {
		return nil, nil, err
	}
	workloads.Decorate(job, c.cfg.Objects)
	workloads.Decorate(&job.Spec.Template, c.cfg.Objects)
	c.ends = s.ends()
	if supervised(c.cfg.Spec) {
		if err := c.checkPull(ctx, *w, job); err != nil {
			return nil, nil, err
		}
		if err := c.supervise(ctx, job, container.Name); err != nil {
			return nil, nil, err
		}
	}
	c.syncs.container, c.workload = container.Name, w
	notes = append(notes, more...)
	done("container %s", container.Name)
	for _, note := range notes {
		c.cfg.Progress(api.Event{Time: time.Now(), Warning: note})
	}
	c.change(func(s *api.Clone) { s.Name, s.Notes = job.Name, notes })
	return job, service(job, w.Ports()), nil
}

// recorder records what all users of the workload may know.
func (c *Clone) recorder() workloads.Recorder {
	return workloads.Recorder{Kube: c.kube, Logger: c.log, Workload: c.workload, Owner: c.cfg.Owner}
}

// watch keeps the list of the pods of the Job.
func (c *Clone) watch(ctx context.Context, job *batchv1.Job) error {
	return c.cfg.Cluster.WatchPods(ctx, &workloads.Workload{
		Namespace: job.Namespace, Name: job.Name, Kind: "Job",
		Resource: batchv1.SchemeGroupVersion.WithResource("jobs"),
		Selector: labels.SelectorFromSet(labels.Set{labelClone: job.Name}),
	}, func(now []corev1.Pod) {
		c.mu.Lock()
		c.listed = now
		c.mu.Unlock()
		c.again.Raise()
	})
}

// step reports that a step begins. The returned function reports its end.
func (c *Clone) step(format string, args ...any) (done func(format string, args ...any)) {
	return api.BeginStep(c.cfg.Progress, c.log, format, args...)
}

// create creates the Job and its Service, or returns why there is no Service.
func (c *Clone) create(ctx context.Context, job *batchv1.Job, own *corev1.Service) (*batchv1.Job, noService, error) {
	live, err := c.createJob(ctx, job)
	if err != nil {
		return nil, "", err
	}
	c.mu.Lock()
	c.over, c.uid = false, live.UID
	c.mu.Unlock()
	c.again.Raise() // its pods may have arrived earlier
	without, err := c.name(ctx, own, live)
	if err != nil || without != "" {
		return live, without, err
	}
	host := own.Name + "." + own.Namespace
	if c.cfg.Spec.Host != "" {
		outside, err := c.addRoute(ctx, own, live)
		if err != nil {
			return live, "", err
		}
		host += ", " + outside
	}
	c.change(func(s *api.Clone) { s.Host, s.Ports = host, hostPorts(own) })
	return live, "", nil
}

// createJob creates the Job. It first deletes a Job of the same name that an earlier daemon with the owner's key left.
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
		_, otherName := c.advice()
		switch {
		case there.Labels[labelManagedBy] != managedBy || owner == "":
			return nil, api.Errorf(api.ExitConflict, "the namespace %s already has a Job %s that is not a clone",
				job.Namespace, job.Name).
				WithHint("%s", otherName)
		case there.Annotations[annotationKey] != c.cfg.Key,
			there.Annotations[annotationWorkload] != job.Annotations[annotationWorkload]:
			return nil, taken(there, owner)
		}
		if err := c.awaitAbandoned(ctx, there); err != nil {
			return nil, err
		}
		if err := remove(ctx, c.kube, job.Namespace, job.Name, there.UID); err != nil {
			return nil, err
		}
	}
	gone, cancel := context.WithTimeout(ctx, deletionTimeout)
	defer cancel()
	for {
		live, err := jobs.Create(gone, job, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return live, err
		}
		if !wakeup.Pause(gone, retryPause) {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, api.Errorf(api.ExitNotReady, "the earlier %s %s was not deleted in time", c.kind(), job.Name)
		}
	}
}

// taken returns an error that names the owner of a clone.
func taken(by *batchv1.Job, owner string) *api.Error {
	return api.Errorf(api.ExitConflict, "the namespace %s already has a clone %s of %s, which %s owns since %s",
		by.Namespace, by.Name,
		by.Annotations[annotationWorkload], owner, by.CreationTimestamp.Local().Format(time.DateTime)).
		WithHint("Choose another name: --name NAME")
}

// awaitAbandoned waits until it is certain that nobody renews a clone, and fails if somebody does: machines that share
// a home directory have the same key.
func (c *Clone) awaitAbandoned(ctx context.Context, there *batchv1.Job) error {
	done := c.step("Waiting for an earlier daemon to renew the %s %s", c.kind(), there.Name)
	now := there
	for began := time.Now(); !workloads.JobEnded(now) && time.Since(began) < aliveTimeout; {
		if !wakeup.Pause(ctx, retryPause) {
			return ctx.Err()
		}
		var err error
		now, err = c.kube.BatchV1().Jobs(there.Namespace).Get(ctx, there.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && now.UID != there.UID:
			done("the clone is gone") // another one in its place makes Create fail again
			return nil
		case err != nil:
			return err
		case deadline(now) != deadline(there):
			return taken(there, "another "+there.Annotations[annotationOwner])
		}
	}
	done("no daemon renews it")
	return nil
}

// deadline returns the age at which a Job ends, in seconds, or 0.
func deadline(j *batchv1.Job) int64 { return ptr.Deref(j.Spec.ActiveDeadlineSeconds, 0) }

// follow updates the status when the pods of the Job change, and when they have received their files.
func (c *Clone) follow(ctx context.Context) error {
	for {
		select {
		case <-c.again:
		case <-ctx.Done():
			return ctx.Err()
		}
		c.mu.Lock()
		job, now := c.uid, c.listed
		c.mu.Unlock()
		own := slices.DeleteFunc(slices.Clone(now), func(p corev1.Pod) bool { // of an earlier Job of the same name
			owner := metav1.GetControllerOf(&p)
			return owner == nil || owner.UID != job
		})
		c.syncs.follow(ctx, own)
		c.update(own)
	}
}

// podCounts sums up the pods of a clone.
type podCounts struct {
	ready, ended int
	trouble      string // why the first unready pod is not ready
}

// describe returns the pods that requests may go to, now or later.
func (c *Clone) describe(pods []corev1.Pod) (list []api.ClonePod, n podCounts) {
	for _, p := range pods {
		switch {
		case p.Status.Phase == corev1.PodSucceeded:
			n.ended++ // also one that was deleted or evicted and ended well: the Job counts it too
			continue
		case p.DeletionTimestamp != nil:
			continue
		case p.Status.Phase == corev1.PodFailed:
			if c.ends { // the Job tries again with another pod
				failed, _ := reason(&p)
				n.trouble = cmp.Or(n.trouble, failed)
			}
			continue
		}
		shown := api.ClonePod{Name: p.Name, IP: p.Status.PodIP}
		if podutils.IsPodReady(&p) {
			missing := c.syncs.missing(p.UID)
			if shown.Ready = missing == nil; missing != nil {
				shown.Reason = missing.String()
			}
		} else {
			shown.Reason, _ = reason(&p)
		}
		if shown.Ready {
			n.ready++
		}
		n.trouble = cmp.Or(n.trouble, shown.Reason)
		list = append(list, shown)
	}
	return list, n
}

// update publishes the state of the clone's pods.
func (c *Clone) update(pods []corev1.Pod) {
	list, n := c.describe(pods)
	c.mu.Lock()
	done := c.status.State == api.CloneDone || c.ends && n.ended >= int(max(c.cfg.Spec.Replicas, 1))
	c.over = c.over || n.ended > 0
	c.status.Pods, c.pods = list, pods
	switch {
	case c.status.State == api.CloneLeaving || c.status.State == api.CloneFailed:
	case done:
		c.status.State, c.status.LastError = api.CloneDone, ""
	case n.ready > 0:
		c.status.State, c.status.LastError = api.CloneRunning, ""
	case c.status.State != api.CloneStarting || n.trouble != "":
		if c.status.State != api.CloneStarting {
			c.status.State = api.CloneWaiting
		}
		c.status.LastError = cmp.Or(n.trouble, c.status.LastError)
	}
	c.mu.Unlock()
	if c.cfg.OnPods != nil {
		c.cfg.OnPods(slices.Clone(list))
	}
	if n.ended > 0 {
		c.ended.Raise()
	}
	if n.ready > 0 || done || c.cfg.Make != nil && slices.ContainsFunc(pods, runs) {
		c.begin() // after OnPods
	}
}

// remove deletes the Job, and with it the pods and the Service.
func (c *Clone) remove(ctx context.Context) error {
	c.change(func(s *api.Clone) { s.State = api.CloneLeaving })
	status := c.Status()
	if status.Name == "" {
		return nil // it was not created
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	live, err := c.kube.BatchV1().Jobs(status.Namespace).Get(ctx, status.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	c.mu.Lock()
	own := c.uid
	c.mu.Unlock()
	if err == nil && live.UID != own {
		return nil // of another owner, or of another daemon with the same key
	}
	if err == nil {
		err = remove(ctx, c.kube, status.Namespace, status.Name, live.UID)
	}
	if err != nil {
		return fmt.Errorf("cannot delete the %s %s, which ends by itself %v after its last renewal: %w", c.kind(),
			status.Name, c.lease, err)
	}
	return nil
}

// remove deletes a Job if it still has that UID.
func remove(ctx context.Context, kube kubernetes.Interface, namespace, name string, uid types.UID) error {
	err := kube.BatchV1().Jobs(namespace).Delete(ctx, name, metav1.DeleteOptions{
		PropagationPolicy: new(metav1.DeletePropagationBackground), Preconditions: &metav1.Preconditions{UID: &uid},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another one
	}
	return err
}

// RemoveLeft deletes the clones of a workload, TYPE/NAME, whose owner's key has that hash; "" means all owners. It
// returns their names. It serves to remove clones whose daemon is gone; a running daemon notices that its clone was
// deleted.
func RemoveLeft(ctx context.Context, kube kubernetes.Interface, namespace, workload, key string) ([]string, error) {
	all, err := jobs(ctx, kube, namespace)
	if err != nil {
		return nil, fmt.Errorf("cannot list clones: %w", err)
	}
	var removed []string
	var errs []error
	for _, j := range all {
		if j.DeletionTimestamp != nil || j.Annotations[annotationWorkload] != namespace+"/"+workload || key != "" &&
			j.Annotations[annotationKey] != key {
			continue
		}
		if err := remove(ctx, kube, j.Namespace, j.Name, j.UID); err != nil {
			errs = append(errs, fmt.Errorf("cannot delete the clone %s in the namespace %s: %w", j.Name, j.Namespace,
				err))
			continue
		}
		removed = append(removed, j.Name)
	}
	return removed, errors.Join(errs...)
}
