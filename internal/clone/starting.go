package clone

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
)

const (
	readyPatience = 2 * time.Minute  // for a first pod to be ready, since an image was pulled, an init container ran, files moved
	slowPatience  = 15 * time.Minute // for images and init containers
	startTrouble  = 5 * time.Second  // for which a pod cannot start, until that counts as for good: a Secret may come a moment later than the pod
	placeTrouble  = 30 * time.Second // for which no node has room, likewise: an autoscaler takes a moment to say that it makes some
	syncTrouble   = 10 * time.Second // for which no file reaches the first pod, likewise
	movement      = 1 << 10          // bytes that are more than signs of life

	wordLines = 20 // of a container's log
	wordBytes = 4 << 10
	lineBytes = 500 // of what Kubernetes says

	logTimeout = 5 * time.Second
)

// hitch is why no pod of a clone gets requests yet.
type hitch struct {
	text  string        // for people, who are waiting
	slow  bool          // it is known to take its time
	wrong *api.Error    // nil: nothing is, as far as is known
	lasts time.Duration // for which it has to be wrong, until that counts as for good
	pod   *corev1.Pod   // whose log may tell more; nil: there is none
}

// await fails when no first pod comes to be ready, with the files that go to it.
func (c *Clone) await(ctx context.Context, name string) error {
	what := "Waiting for a pod of " + name + " to be ready"
	done := c.step("%s", what)
	look := time.NewTicker(retryPause)
	defer look.Stop()
	began := time.Now()
	deadline := began.Add(readyPatience)
	var told string
	var wrongSince time.Time
	var moved int64
	for {
		select {
		case <-c.ready:
			done("%s", c.startedWith())
			close(c.begun)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-look.C:
		}
		h := c.hitch(ctx, name)
		now := time.Now()
		if h.text != told && h.text != "" {
			told = h.text
			c.cfg.Progress(api.Event{Time: now, Step: what, Detail: told})
		}
		sent := c.syncs.sent.Load()
		if sent >= moved+movement || h.slow && now.Sub(began) < slowPatience {
			moved, deadline = sent, now.Add(readyPatience)
		}
		if h.wrong == nil {
			wrongSince = time.Time{}
		} else if wrongSince.IsZero() {
			wrongSince = now
		}
		switch {
		case h.wrong != nil && now.Sub(wrongSince) >= h.lasts:
			return c.withWords(ctx, h.wrong, h.pod)
		case !now.Before(deadline):
			return c.withWords(ctx, api.Errorf(api.ExitNotReady, "no pod of the clone %s has become ready in %v: %s", name, now.Sub(began).Round(time.Second), h.text), h.pod)
		}
	}
}

// startedWith says what a clone has begun with, and warns of files that it has not.
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

// hitch looks at what there is: the Job, its pods, what Kubernetes tells of them.
func (c *Clone) hitch(ctx context.Context, name string) hitch {
	c.mu.Lock()
	pods, job := c.pods, c.uid
	c.mu.Unlock()
	var first *hitch
	for n := range pods {
		p := &pods[n]
		if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed && !c.ends {
			continue
		}
		if h := c.hitchOf(ctx, name, p); first == nil || first.wrong == nil && h.wrong != nil {
			first = &h
		}
	}
	if first != nil {
		return *first
	}
	h := hitch{text: "Kubernetes has not made it yet"}
	if text := warning(c.events(ctx, job), anyEvent); text != "" { // a quota, an admission webhook, a ServiceAccount that is not there
		h.text, h.lasts, h.wrong = text, startTrouble, api.Errorf(api.ExitNotReady, "the clone %s does not start: %s", name, text)
	}
	return h
}

// hitchOf is what one pod waits for.
func (c *Clone) hitchOf(ctx context.Context, name string, p *corev1.Pod) hitch {
	h := hitch{pod: p}
	var final bool
	if h.text, final = reason(p); h.text != "" {
		if final || p.Status.Phase == corev1.PodFailed {
			code := api.ExitNotReady
			if strings.Contains(h.text, "Image") {
				code = api.ExitImagePull
			}
			h.lasts, h.wrong = startTrouble, api.Errorf(code, "the clone %s does not start: %s", name, h.text)
		}
		return h
	}
	if h.text = unplaced(p); h.text != "" {
		if text := scaling(c.events(ctx, p.UID)); text != "" {
			h.text, h.slow = h.text+": "+text, true
			return h
		}
		h.lasts, h.wrong = placeTrouble, api.Errorf(api.ExitNotReady, "the clone %s does not start: %s", name, h.text)
		return h
	}
	if n := slices.IndexFunc(p.Status.InitContainerStatuses, func(s corev1.ContainerStatus) bool { return s.State.Running != nil }); n >= 0 && p.Status.Phase == corev1.PodPending {
		h.text, h.slow = "the init container "+p.Status.InitContainerStatuses[n].Name+" runs", true
		return h
	}
	if p.Status.Phase != corev1.PodRunning {
		events := c.events(ctx, p.UID)
		if h.text = pulling(events); h.text != "" {
			h.slow = true
			return h
		}
		if h.text = warning(events, ofKubelet); h.text == "" {
			h.text, h.slow = "its containers are being made", true
		}
		return h
	}
	missing := c.syncs.lack(p.UID)
	switch {
	case missing != nil && missing.why != "":
		h.lasts, h.wrong = c.syncTrouble, api.Errorf(api.ExitNotReady, "no files reach %s of the clone %s: %s", missing.remote, name, missing.why).
			WithHint("The container's user has to be able to write there; docs/clone.md has more.")
		fallthrough
	case missing != nil:
		h.text = missing.String()
	case !podutils.IsPodReady(p):
		h.text = cmp.Or(warning(c.events(ctx, p.UID), ofProbe), "its readiness probe has not succeeded yet")
	}
	return h
}

// reason is why a pod is not ready; final reports that waiting does not help.
func reason(p *corev1.Pod) (text string, final bool) {
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
			text := s.Name + ": " + w.Reason
			if w.Message != "" {
				text += ": " + line(w.Message)
			}
			return text, slices.Contains([]string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError", "CrashLoopBackOff"}, w.Reason)
		}
		if t := s.State.Terminated; t != nil && t.ExitCode != 0 {
			return fmt.Sprintf("%s ended with exit code %d (%s)", s.Name, t.ExitCode, t.Reason), false
		}
	}
	return "", false
}

// unplaced is why a pod is on no node, or "".
func unplaced(p *corev1.Pod) string {
	for _, condition := range p.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return cmp.Or(strings.TrimSuffix(line(condition.Message), "."), condition.Reason)
		}
	}
	return ""
}

// scaling says that a node is being made for a pod, as the cluster-autoscaler and Karpenter tell it, or "".
func scaling(events []corev1.Event) string {
	for _, e := range events {
		if e.Reason == "TriggeredScaleUp" || e.Reason == "Nominated" {
			return line(e.Message)
		}
	}
	return ""
}

// events are what Kubernetes tells of an object. Who may not read them does without.
func (c *Clone) events(ctx context.Context, of types.UID) []corev1.Event {
	list, err := c.kube.CoreV1().Events(c.Status().Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("involvedObject.uid", string(of)).String(),
	})
	if err != nil {
		c.log.Debug("reading events", "err", err)
		return nil
	}
	return slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return e.InvolvedObject.UID != of })
}

// warning is the latest of some, or "".
func warning(events []corev1.Event, of func(corev1.Event) bool) string {
	var last corev1.Event
	for _, e := range events {
		if e.Type == corev1.EventTypeWarning && of(e) && !when(e).Before(when(last)) {
			last = e
		}
	}
	return line(last.Message)
}

func anyEvent(corev1.Event) bool { return true }
func ofKubelet(e corev1.Event) bool {
	return e.Source.Component == "kubelet" || e.ReportingController == "kubelet"
}
func ofProbe(e corev1.Event) bool { return e.Reason == "Unhealthy" }

// when an event was, the last time: there are two ways to say so.
func when(e corev1.Event) time.Time {
	if e.Series != nil {
		return e.Series.LastObservedTime.Time
	}
	if e.LastTimestamp.IsZero() {
		return e.EventTime.Time
	}
	return e.LastTimestamp.Time
}

// pulling says which image is being pulled, or "".
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

// line is a text of others on one line, and not too long.
func line(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > lineBytes {
		text = strings.ToValidUTF8(text[:lineBytes], "") + "..."
	}
	return text
}

// withWords adds to an error what a pod said last. The pod does not outlive the error.
func (c *Clone) withWords(ctx context.Context, err *api.Error, p *corev1.Pod) error {
	if p == nil {
		return err
	}
	container, words := c.words(ctx, p)
	if words == "" {
		return err
	}
	hint := "The last lines of its container " + container + ":\n  " + strings.ReplaceAll(words, "\n", "\n  ")
	if err.Hint != "" {
		hint = err.Hint + "\n" + hint
	}
	return err.WithHint("%s", hint)
}

// words are the last lines of the container that failed, or else of the one that the clone is about, if it has begun.
func (c *Clone) words(ctx context.Context, p *corev1.Pod) (container, words string) {
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
	words = c.lastLines(ctx, p, of.Name, false)
	end := cmp.Or(of.State.Terminated, of.LastTerminationState.Terminated)
	if words == "" && of.LastTerminationState.Terminated != nil {
		words = c.lastLines(ctx, p, of.Name, true)
	}
	if words == "" && end != nil { // it may never have run: no such program
		words = line(end.Message)
	}
	return of.Name, words
}

// lastLines are those of a container's log, or "".
func (c *Clone) lastLines(ctx context.Context, p *corev1.Pod, container string, previous bool) string {
	ctx, cancel := context.WithTimeout(ctx, logTimeout)
	defer cancel()
	log, err := c.kube.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
		Container: container, Previous: previous, TailLines: new(int64(wordLines)), LimitBytes: new(int64(16 * wordBytes)),
	}).Stream(ctx)
	if err != nil {
		c.log.Warn("reading the log of a container", "pod", p.Name, "container", container, "err", err)
		return ""
	}
	defer log.Close()
	all, err := io.ReadAll(io.LimitReader(log, 16*wordBytes))
	if err != nil {
		c.log.Warn("reading the log of a container", "pod", p.Name, "container", container, "err", err)
	}
	text := strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return -1 // it goes to a terminal
	}, strings.ToValidUTF8(string(all), "?"))
	text = strings.TrimSpace(text)
	if len(text) > wordBytes {
		text = "..." + strings.ToValidUTF8(text[len(text)-wordBytes:], "")
	}
	return text
}
