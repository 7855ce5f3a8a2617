package workloads

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record/util"

	"kubevpn/internal/api"
)

// recordTimeout limits the request that creates an Event.
const recordTimeout = 2 * time.Second

// Recorder creates Kubernetes Events about a workload, with the rights of the user.
type Recorder struct {
	Kube     kubernetes.Interface
	Logger   *slog.Logger
	Workload *Workload
	Owner    string // user@host, which proves nothing: the Event says so
}

// Record creates an Event, and reports whether the API server has accepted it. A user without the right gets none, and
// nothing else fails. The reason is a word in camel case, the message continues a sentence that begins with the owner.
func (r Recorder) Record(ctx context.Context, reason, format string, args ...any) bool {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	o, now := r.Workload.Object, metav1.Now()
	name := util.GenerateEventName(r.Workload.Name, now.UnixNano())
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.Workload.Namespace, Name: name},
		InvolvedObject: corev1.ObjectReference{APIVersion: o.GetAPIVersion(), Kind: r.Workload.Kind,
			Namespace: r.Workload.Namespace, Name: r.Workload.Name, UID: o.GetUID()},
		Type: corev1.EventTypeNormal, Reason: reason,
		Message:        api.CleanLine(r.Owner) + " (self-asserted) " + fmt.Sprintf(format, args...),
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
		Source: corev1.EventSource{Component: fieldManager}, ReportingController: fieldManager,
	}
	_, err := r.Kube.CoreV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{})
	if err != nil {
		r.Logger.Debug("cannot create an Event", "workload", r.Workload, "reason", reason, "err", err)
	}
	return err == nil
}
