package workloads

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Events returns the events of an object. Errors are those of client-go.
func Events(ctx context.Context, kube kubernetes.Interface, namespace string, of types.UID) ([]corev1.Event, error) {
	list, err := kube.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("involvedObject.uid", string(of)).String(),
	})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return e.InvolvedObject.UID != of }), nil
}

// Warning returns the message of the latest warning that of selects, or "".
func Warning(events []corev1.Event, of func(corev1.Event) bool) string {
	var last corev1.Event
	for _, e := range events {
		if e.Type == corev1.EventTypeWarning && of(e) && !LastSeen(e).Before(LastSeen(last)) {
			last = e
		}
	}
	return last.Message
}

// LastSeen returns the last time of an event: events come in two forms.
func LastSeen(e corev1.Event) time.Time {
	if e.Series != nil {
		return e.Series.LastObservedTime.Time
	}
	if e.LastTimestamp.IsZero() {
		return e.EventTime.Time
	}
	return e.LastTimestamp.Time
}
