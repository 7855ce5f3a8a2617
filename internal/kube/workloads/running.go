package workloads

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/kube/podenv"
)

// Model returns a template pod: that of Running or, if no pod runs, the one that the API server would create from the
// template, with the additions of admission. missing is a warning that names what such a pod lacks.
func (w *Workload) Model(ctx context.Context, kube kubernetes.Interface) (pod *corev1.Pod, missing string, err error) {
	if pod, err = w.Running(ctx, kube); pod != nil || err != nil {
		return pod, "", err
	}
	return w.planned(ctx, kube)
}

// Running returns the newest ready pod of the workload, or else the newest running one, or nil.
func (w *Workload) Running(ctx context.Context, kube kubernetes.Interface) (*corev1.Pod, error) {
	list, err := kube.CoreV1().Pods(w.Namespace).List(ctx, w.choose(metav1.ListOptions{}))
	if err != nil {
		return nil, err
	}
	running := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return !podenv.Runs(&p) })
	if len(running) == 0 {
		return nil, nil
	}
	best := slices.MaxFunc(running, func(a, b corev1.Pod) int {
		switch ready := podutils.IsPodReady(&a); {
		case ready == podutils.IsPodReady(&b):
		case ready:
			return 1
		default:
			return -1
		}
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	return &best, nil
}

// planned asks the API server for a pod of the template in a dry run, because the template lacks the token of the
// service account, default limits and all else that admission adds.
func (w *Workload) planned(ctx context.Context, kube kubernetes.Interface) (*corev1.Pod, string, error) {
	meta := w.Template.ObjectMeta
	made := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		GenerateName: w.Name + "-", Namespace: w.Namespace, Labels: meta.Labels, Annotations: meta.Annotations,
	}, Spec: w.Template.Spec}
	missing := fmt.Sprintf("no pod of %s runs, so the address and the node of the pod are empty", w)
	got, err := kube.CoreV1().Pods(w.Namespace).Create(ctx, made,
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		if ctx.Err() != nil {
			return nil, "", err
		}
		made = made.DeepCopy()
		return made, fmt.Sprintf("%s; what the cluster adds to pods, such as the service account's token, is "+
			"missing: %v", missing, err), nil
	}
	got.UID = "" // the pod does not exist, so no token can be bound to it
	return got, missing, nil
}
