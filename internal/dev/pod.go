package dev

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/podenv"
	"kubevpn/internal/workloads"
)

// Pod returns the pod that a program stands for: that of [Running] or, where no pod runs, the one that the API server
// would create from the template, with what admission adds; missing says what such a pod does not have.
func Pod(ctx context.Context, kube kubernetes.Interface,
	w *workloads.Workload) (pod *corev1.Pod, missing string, err error) {
	if pod, err = Running(ctx, kube, w); pod != nil || err != nil {
		return pod, "", err
	}
	return planned(ctx, kube, w)
}

// Running returns the newest of the workload's pods that is ready, or else that runs; nil if none runs.
func Running(ctx context.Context, kube kubernetes.Interface, w *workloads.Workload) (*corev1.Pod, error) {
	var options metav1.ListOptions
	switch {
	case w.Selector != nil:
		options.LabelSelector = w.Selector.String()
	case w.Kind == "Pod":
		options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, w.Name).String()
	default: // it has a template only, as a CronJob
		return nil, nil
	}
	list, err := kube.CoreV1().Pods(w.Namespace).List(ctx, options)
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

// planned asks the API server for a pod of the template without having it made: its service account's token, limits by
// default, and whatever else is added to pods are in no template.
func planned(ctx context.Context, kube kubernetes.Interface, w *workloads.Workload) (*corev1.Pod, string, error) {
	meta := w.Template.ObjectMeta
	made := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		GenerateName: w.Name + "-", Namespace: w.Namespace, Labels: meta.Labels, Annotations: meta.Annotations,
	}, Spec: w.Template.Spec}
	missing := fmt.Sprintf("no pod of %s runs: what only a running pod has, its address and its node, is empty", w)
	got, err := kube.CoreV1().Pods(w.Namespace).Create(ctx, made,
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		if ctx.Err() != nil {
			return nil, "", err
		}
		made = made.DeepCopy()
		return made, fmt.Sprintf("%s; and what the cluster adds to pods, their service account's token among it, is "+
			"missing: %v", missing, err), nil
	}
	got.UID = "" // nothing has it: no token can be bound to it
	return got, missing, nil
}
