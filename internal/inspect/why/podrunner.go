package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/process/files"
)

// Stay is how long the container of a PodRunner stays.
const Stay = 10 * time.Minute

// PodRunner runs errands in a pod: by a program in an ephemeral container of it. The container ends by itself after
// Stay, and its entry remains in the pod's specification until the pod ends.
type PodRunner struct {
	Pod       *corev1.Pod
	Container string // its name
	New       bool   // Start has to add the container

	cluster *client.Cluster
	helper  workloads.Helper
}

// NewPodRunner checks whether the cluster admits the container in a pod that runs. Every level of pod security does. It
// changes nothing. Errors are *api.Error.
func NewPodRunner(ctx context.Context, c *client.Cluster, pod *corev1.Pod, image string) (*PodRunner, error) {
	s := &PodRunner{Pod: pod, cluster: c, helper: workloads.Helper{
		Prefix: "kubevpn-why-", Image: image,
		Args: func(string) []string { return []string{"trip", "--stay", Stay.String()} },
		// Not the pod's user, which may be that of a mesh's proxy: the mesh does not redirect its own proxy.
		Security: workloads.Restricted(), What: "the container of `kubevpn why --from`",
		Instead: "Without --from, `kubevpn why` sends the request from this machine.",
	}}
	var err error
	s.Container, s.New, err = workloads.New(c).AddHelper(ctx, pod, s.helper, true)
	return s, err
}

// Start adds the container if the pod has none, and waits until it runs. Errors are *api.Error.
func (s *PodRunner) Start(ctx context.Context) error {
	w := workloads.New(s.cluster)
	name, _, err := w.AddHelper(ctx, s.Pod, s.helper, false)
	if err != nil {
		return err
	}
	s.Container = name
	return w.AwaitHelper(ctx, s.Pod, name)
}

// Run is a trip.Runner: it runs an errand in the container. It trusts nothing that the container sends.
func (s *PodRunner) Run(ctx context.Context, e trip.Errand) (r trip.Report, err error) {
	conn := s.cluster.DialExec(s.Pod.Namespace, s.Pod.Name, s.Container, []string{files.Program, "trip"})
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
