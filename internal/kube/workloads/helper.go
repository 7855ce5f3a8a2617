package workloads

import (
	"context"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podstatus"
)

// startTimeout limits the time until a Helper runs. The node may have to pull the image.
const startTimeout = time.Minute

// Helper describes an ephemeral container in which kubevpn runs programs, by pods/exec. It stays for a while and ends
// by itself; its entry remains in the pod's specification until the pod ends.
type Helper struct {
	Prefix   string // with a number, its name
	Image    string
	Args     func(name string) []string // of the program that stays
	Target   string                     // the container whose processes it sees; empty: none
	Security *corev1.SecurityContext
	What     string // names it in errors
	Instead  string // the hint of errors: what does without it
}

func (h Helper) container(name string) corev1.EphemeralContainer {
	c := Container(name, h.Image, h.Security, h.Args(name)...)
	c.TargetContainerName = h.Target
	return c
}

// AddHelper adds the container to the pod, unless one like it stays there. It returns the container's name, and whether
// AddHelper added it, or with dry would add it. Errors are *api.Error.
func (c Client) AddHelper(ctx context.Context, p *corev1.Pod, h Helper, dry bool) (name string, added bool, err error) {
	name, added, err = Ephemeral{
		Prefix: h.Prefix,
		New:    h.container,
		Serves: func(p *corev1.Pod, c corev1.EphemeralContainer) bool {
			return c.Image == h.Image && c.TargetContainerName == h.Target && slices.Equal(c.Args, h.Args(c.Name)) &&
				!hasEnded(p, c.Name)
		},
		Check: func(p *corev1.Pod) error { return Unfit("pod/"+p.Name, p.Spec) },
	}.Add(ctx, c.Kube(), p, dry)
	if err != nil {
		err = refusal(p, err, h.What, h.Instead)
	}
	return name, added, c.ExplainContext(ctx, err)
}

// AwaitHelper waits until the container of a Helper runs. Errors are *api.Error.
func (c Client) AwaitHelper(ctx context.Context, p *corev1.Pod, name string) error {
	return c.ExplainContext(ctx, c.awaitHelper(ctx, p, name))
}

func (c Client) awaitHelper(ctx context.Context, p *corev1.Pod, name string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	what, gone, last := "the container "+name, false, podstatus.Status{}
	failed := func() bool {
		return last.Problem == podstatus.Ended || last.Problem != podstatus.None && !last.Retrying
	}
	err := client.NewMirror(c.Kube(), &corev1.Pod{}, metav1.ListOptions{FieldSelector: "metadata.name=" + p.Name},
		c.Kube().CoreV1().Pods(p.Namespace)).Follow(ctx, func(all []*corev1.Pod) {
		if gone = len(all) == 0 || all[0].UID != p.UID; !gone {
			last = podstatus.Of(all[0], name)
		}
		if gone || last.Running || failed() {
			cancel()
		}
	})
	switch {
	case gone:
		return client.PodGone(p.Namespace, p.Name)
	case last.Running:
		return nil
	case failed():
		return last.Error(what, api.ExitInject)
	case errors.Is(err, context.DeadlineExceeded):
		return api.Errorf(api.ExitInject, "%s of the pod %s does not start: %s", what, p.Name, last.Text).
			WithHint("`kubectl -n %s describe pod %s` shows the cause.", api.ShellQuote(p.Namespace),
				api.ShellQuote(p.Name))
	}
	return err
}
