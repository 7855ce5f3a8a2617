package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podstatus"
	"kubevpn/internal/kube/workloads"
)

const (
	// Stay is how long the container of a PodRunner stays.
	Stay = 10 * time.Minute
	// startTimeout limits the time until that container runs. The node may have to pull the image.
	startTimeout = time.Minute
)

// PodRunner runs errands in a pod: by a program in an ephemeral container of it. The container ends by itself after
// Stay, and its entry remains in the pod's specification until the pod ends.
type PodRunner struct {
	Pod       *corev1.Pod
	Container string // its name
	New       bool   // Start has to add the container

	cluster *client.Cluster
	sender  workloads.Sender
}

// NewPodRunner checks whether the cluster admits the container in a pod that runs. It changes nothing. Errors are
// *api.Error.
func NewPodRunner(ctx context.Context, c *client.Cluster, pod *corev1.Pod, image string) (*PodRunner, error) {
	s := &PodRunner{Pod: pod, cluster: c,
		sender: workloads.Sender{Image: image, Args: []string{"trip", "--stay", Stay.String()}}}
	var err error
	s.Container, s.New, err = workloads.New(c).AddSender(ctx, pod, s.sender, true)
	return s, err
}

// Start adds the container if the pod has none, and waits until it runs. Errors are *api.Error.
func (s *PodRunner) Start(ctx context.Context) error {
	name, _, err := workloads.New(s.cluster).AddSender(ctx, s.Pod, s.sender, false)
	if err != nil {
		return err
	}
	s.Container = name
	return s.cluster.ExplainContext(ctx, s.await(ctx))
}

// await waits until the container runs.
func (s *PodRunner) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	kube, what, gone, last := s.cluster.Kube(), "the container "+s.Container, false, podstatus.Status{}
	failed := func() bool {
		return last.Problem == podstatus.Ended || last.Problem != podstatus.None && !last.Retrying
	}
	err := client.NewMirror(kube, &corev1.Pod{}, metav1.ListOptions{FieldSelector: "metadata.name=" + s.Pod.Name},
		kube.CoreV1().Pods(s.Pod.Namespace)).Follow(ctx, func(all []*corev1.Pod) {
		if gone = len(all) == 0 || all[0].UID != s.Pod.UID; !gone {
			last = podstatus.Of(all[0], s.Container)
		}
		if gone || last.Running || failed() {
			cancel()
		}
	})
	switch {
	case gone:
		return client.PodGone(s.Pod.Namespace, s.Pod.Name)
	case last.Running:
		return nil
	case failed():
		return last.Error(what, api.ExitInject)
	case errors.Is(err, context.DeadlineExceeded):
		return api.Errorf(api.ExitInject, "%s of the pod %s does not start: %s", what, s.Pod.Name, last.Text).
			WithHint("`kubectl -n %s describe pod %s` shows the cause.", api.ShellQuote(s.Pod.Namespace),
				api.ShellQuote(s.Pod.Name))
	}
	return err
}

// Run is a trip.Runner: it runs an errand in the container. It trusts nothing that the container sends.
func (s *PodRunner) Run(ctx context.Context, e trip.Errand) (r trip.Report, err error) {
	conn := s.cluster.DialExec(s.Pod.Namespace, s.Pod.Name, s.Container, []string{trip.Program, "trip"})
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_ = json.NewEncoder(conn).Encode(e) // if it fails, ReadReport says why
	r, err = trip.ReadReport(conn)
	if ctx.Err() != nil {
		err = errors.New("no answer in time")
	}
	if err != nil {
		return r, s.cluster.Explain(fmt.Errorf("cannot send the request from the pod %s: %w", s.Pod.Name, err))
	}
	return r, nil
}
