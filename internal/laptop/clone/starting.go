package clone

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podstatus"
	"kubevpn/internal/kube/workloads"
)

const (
	// readyTimeout limits the wait for a ready pod. Images, init containers and copied files start it again.
	readyTimeout  = 2 * time.Minute
	slowTimeout   = 15 * time.Minute // for images and init containers
	startGrace    = 5 * time.Second  // while a pod fails to start: a Secret may be created a moment after the pod
	scheduleGrace = 30 * time.Second // while no node has room: an autoscaler reacts after a moment
	syncGrace     = 10 * time.Second // while no file reaches the first pod
	minProgress   = 1 << 10          // bytes that count as progress: more than those that keep a connection alive

	logLines     = 20 // of a container's log
	logBytes     = 4 << 10
	messageBytes = 500 // of a message of Kubernetes

	logTimeout = 5 * time.Second
)

// startProblem describes why no pod of a clone receives requests yet.
type startProblem struct {
	text  string        // for the user
	slow  bool          // it may take long, such as an image
	wrong *api.Error    // nil: nothing is known to be wrong
	lasts time.Duration // the clone fails if wrong lasts longer
	pod   *corev1.Pod   // its log may have the cause; nil: none
}

// await waits until a pod is ready and has its files. It returns an error after a timeout, which depends on the
// problem.
func (c *Clone) await(ctx context.Context, name string) error {
	what := "Waiting for a pod of " + name + " to be ready"
	done := c.step("%s", what)
	look := time.NewTicker(retryPause)
	defer look.Stop()
	began := time.Now()
	deadline := began.Add(readyTimeout)
	var told string
	var wrongSince time.Time
	var moved int64
	for {
		select {
		case <-c.ready.Done():
			done("%s", c.startedWith())
			close(c.begun)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-look.C:
		}
		h := c.problem(ctx, name)
		now := time.Now()
		if h.text != told && h.text != "" {
			told = h.text
			c.cfg.Progress(api.Event{Time: now, Step: what, Detail: told})
		}
		sent := c.syncs.sent.Load()
		if sent >= moved+minProgress || h.slow && now.Sub(began) < slowTimeout {
			moved, deadline = sent, now.Add(readyTimeout)
		}
		if h.wrong == nil {
			wrongSince = time.Time{}
		} else if wrongSince.IsZero() {
			wrongSince = now
		}
		switch {
		case h.wrong != nil && now.Sub(wrongSince) >= h.lasts:
			return c.withLog(ctx, h.wrong, h.pod)
		case !now.Before(deadline):
			return c.withLog(ctx, api.Errorf(api.ExitNotReady, "no pod of the %s %s became ready within %v: %s",
				c.kind(), name, now.Sub(began).Round(time.Second), h.text), h.pod)
		}
	}
}

// startedWith describes what the clone started with, and warns about files that are missing.
func (c *Clone) startedWith() string {
	files := 0
	for _, s := range c.syncs.status() {
		files += s.Files
		if s.LastError != "" {
			c.cfg.Progress(api.Event{Time: time.Now(), Warning: s.Remote + ": " + s.LastError})
		}
	}
	if len(c.cfg.Spec.Sync) == 0 || c.isDone() {
		return "ready"
	}
	return fmt.Sprintf("ready, with %d files and directories", files)
}

// problem looks at the Job, its pods and their events.
func (c *Clone) problem(ctx context.Context, name string) startProblem {
	c.mu.Lock()
	pods, job := c.pods, c.uid
	c.mu.Unlock()
	var first *startProblem
	for n := range pods {
		p := &pods[n]
		if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed &&
			!c.ends {
			continue
		}
		if h := c.podProblem(ctx, name, p); first == nil || first.wrong == nil && h.wrong != nil {
			first = &h
		}
	}
	if first != nil {
		return *first
	}
	h := startProblem{text: "waiting for Kubernetes to create its pod"}
	// a quota, an admission webhook, a ServiceAccount that is not there
	if text := line(workloads.Warning(c.events(ctx, job), anyEvent)); text != "" {
		h.text, h.lasts, h.wrong = text, startGrace,
			api.Errorf(api.ExitNotReady, "the %s %s does not start: %s", c.kind(), name, text)
	}
	return h
}

// podProblem describes why one pod is not ready.
func (c *Clone) podProblem(ctx context.Context, name string, p *corev1.Pod) startProblem {
	h := startProblem{pod: p}
	var final bool
	if h.text, final = reason(p); h.text != "" {
		if final || p.Status.Phase == corev1.PodFailed {
			code := api.ExitNotReady
			if strings.Contains(h.text, "Image") {
				code = api.ExitImagePull
			}
			h.lasts, h.wrong = startGrace, api.Errorf(code, "the %s %s does not start: %s", c.kind(), name, h.text)
		}
		return h
	}
	if s := podstatus.Of(p, ""); s.Problem == podstatus.Unscheduled {
		h.text = line(s.Text)
		if text := scaling(c.events(ctx, p.UID)); text != "" {
			h.text, h.slow = h.text+": "+text, true
			return h
		}
		h.lasts, h.wrong = scheduleGrace,
			api.Errorf(api.ExitNotReady, "the %s %s does not start: %s", c.kind(), name, h.text)
		return h
	}
	if n := slices.IndexFunc(p.Status.InitContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil
	}); n >= 0 && p.Status.Phase == corev1.PodPending {
		h.text, h.slow = "the init container "+p.Status.InitContainerStatuses[n].Name+" runs", true
		return h
	}
	if p.Status.Phase != corev1.PodRunning {
		events := c.events(ctx, p.UID)
		if h.text = pulling(events); h.text != "" {
			h.slow = true
			return h
		}
		if h.text = line(workloads.Warning(events, ofKubelet)); h.text == "" {
			h.text, h.slow = "creating containers", true
		}
		return h
	}
	missing := c.syncs.missing(p.UID)
	switch {
	case missing != nil && missing.reason != "":
		h.lasts, h.wrong = c.syncGrace,
			api.Errorf(api.ExitNotReady, "cannot copy files to %s of the clone %s: %s", missing.remote, name,
				missing.reason).
				WithHint("The container's user needs write access there; see docs/clone.md.")
		fallthrough
	case missing != nil:
		h.text = missing.String()
	case !podutils.IsPodReady(p):
		h.text = cmp.Or(line(workloads.Warning(c.events(ctx, p.UID), ofProbe)),
			"its readiness probe has not succeeded yet")
	}
	return h
}

// reason returns why a pod is not ready, or "". final reports that waiting does not help.
func reason(p *corev1.Pod) (text string, final bool) {
	for _, c := range podstatus.Containers(p) {
		s, wait := podstatus.Of(p, c.Name), c.State.Waiting
		switch {
		case s.Running, s.Problem == podstatus.Unscheduled, s.Problem == podstatus.Ended && wait == nil &&
			s.End.ExitCode == 0:
		case s.Problem == podstatus.Ended && wait == nil:
			return fmt.Sprintf("%s ended with exit code %d (%s)", c.Name, s.End.ExitCode, s.End.Reason), false
		case s.Problem == podstatus.Ended && !strings.HasPrefix(s.Text, wait.Reason):
			return c.Name + ": " + wait.Reason + ": " + line(s.Text), true
		case s.Problem != podstatus.None:
			return c.Name + ": " + line(s.Text), true
		}
	}
	return "", false
}

// scaling returns the message of the cluster-autoscaler or Karpenter that it is adding a node for a pod, or "".
func scaling(events []corev1.Event) string {
	for _, e := range events {
		if e.Reason == "TriggeredScaleUp" || e.Reason == "Nominated" {
			return line(e.Message)
		}
	}
	return ""
}

// events returns the events of an object, or nil if the user may not read them.
func (c *Clone) events(ctx context.Context, of types.UID) []corev1.Event {
	events, err := workloads.Events(ctx, c.kube, c.Status().Namespace, of)
	if err != nil {
		c.log.Debug("cannot read events", "err", err)
	}
	return events
}

func anyEvent(corev1.Event) bool { return true }
func ofKubelet(e corev1.Event) bool {
	return e.Source.Component == "kubelet" || e.ReportingController == "kubelet"
}
func ofProbe(e corev1.Event) bool { return e.Reason == "Unhealthy" }

// pulling returns which image is being pulled, or "".
func pulling(events []corev1.Event) string {
	for _, e := range events {
		image, is := strings.CutPrefix(e.Message, "Pulling image ")
		if e.Reason == "Pulling" && is && !slices.ContainsFunc(events, func(o corev1.Event) bool {
			return o.Reason == "Pulled" && o.InvolvedObject.FieldPath == e.InvolvedObject.FieldPath
		}) {
			return "pulling the image " + strings.Trim(image, `"`)
		}
	}
	return ""
}

// line returns text on one line, cut to messageBytes.
func line(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > messageBytes {
		text = strings.ToValidUTF8(text[:messageBytes], "") + "..."
	}
	return text
}

// withLog adds the last lines of the log of a pod to an error, because Run then deletes the pod.
func (c *Clone) withLog(ctx context.Context, err *api.Error, p *corev1.Pod) error {
	if p == nil {
		return err
	}
	container, log := c.failedLog(ctx, p)
	if log == "" {
		return err
	}
	hint := "The last lines of its container " + container + ":\n  " + strings.ReplaceAll(log, "\n", "\n  ")
	if err.Hint != "" {
		hint = err.Hint + "\n" + hint
	}
	return err.WithHint("%s", hint)
}

// failedLog returns the last lines of the container that failed, or else of the container of the clone, if it runs.
func (c *Clone) failedLog(ctx context.Context, p *corev1.Pod) (container, log string) {
	var of *corev1.ContainerStatus
	all := slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses)
	for n := range all {
		s := &all[n]
		if end := cmp.Or(s.State.Terminated, s.LastTerminationState.Terminated); end != nil && end.ExitCode != 0 {
			of = s
			break
		}
		if s.Name == c.syncs.container && s.State.Running != nil {
			of = s
		}
	}
	if of == nil {
		return "", ""
	}
	log = c.lastLines(ctx, p, of.Name, false)
	end := cmp.Or(of.State.Terminated, of.LastTerminationState.Terminated)
	if log == "" && of.LastTerminationState.Terminated != nil {
		log = c.lastLines(ctx, p, of.Name, true)
	}
	if log == "" && end != nil { // it may never have run: no such program
		log = line(end.Message)
	}
	return of.Name, log
}

// lastLines returns the end of a container's log, or "".
func (c *Clone) lastLines(ctx context.Context, p *corev1.Pod, container string, previous bool) string {
	ctx, cancel := context.WithTimeout(ctx, logTimeout)
	defer cancel()
	log, err := c.kube.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
		Container: container, Previous: previous, TailLines: new(int64(logLines)),
		LimitBytes: new(int64(16 * logBytes)),
	}).Stream(ctx)
	if err != nil {
		c.log.Warn("cannot read the log of a container", "pod", p.Name, "container", container, "err", err)
		return ""
	}
	defer log.Close()
	all, err := io.ReadAll(io.LimitReader(log, 16*logBytes))
	if err != nil {
		c.log.Warn("cannot read the log of a container", "pod", p.Name, "container", container, "err", err)
	}
	text := api.Clean(string(all))
	text = strings.TrimSpace(text)
	if len(text) > logBytes {
		text = "..." + strings.ToValidUTF8(text[len(text)-logBytes:], "")
	}
	return text
}
