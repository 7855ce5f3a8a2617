package workloads

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// senderPrefix, with a number, is the name of a Sender's container.
const senderPrefix = "kubevpn-why-"

// Sender describes the ephemeral container from which `kubevpn why --from` sends requests. Every level of pod security
// admits it. It ends by itself, and kubevpn runs programs in it while it stays.
type Sender struct {
	Image string
	Args  []string // of the program that stays
}

func (s Sender) container(name string) corev1.EphemeralContainer {
	return corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name:                     name,
		Image:                    s.Image,
		ImagePullPolicy:          corev1.PullIfNotPresent,
		Args:                     s.Args,
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		// Not the pod's user, which may be that of a mesh's proxy: the mesh does not redirect its own proxy.
		SecurityContext: Restricted(),
	}}
}

// AddSender adds the container to the pod, unless one of the same image stays there. It returns the container's name,
// and whether AddSender added it, or with dry would add it. Errors are *api.Error.
func (c Client) AddSender(ctx context.Context, p *corev1.Pod, s Sender, dry bool) (name string, added bool, err error) {
	name, added, err = Ephemeral{
		Prefix: senderPrefix,
		New:    s.container,
		Serves: func(p *corev1.Pod, c corev1.EphemeralContainer) bool {
			return c.Image == s.Image && slices.Equal(c.Args, s.Args) && !hasEnded(p, c.Name)
		},
		Check: func(p *corev1.Pod) error { return Unfit("pod/"+p.Name, p.Spec) },
	}.Add(ctx, c.Kube(), p, dry)
	if err != nil {
		err = refusal(p, err, "the container of `kubevpn why --from`",
			"Without --from, `kubevpn why` sends the request from this machine.")
	}
	return name, added, c.ExplainContext(ctx, err)
}
