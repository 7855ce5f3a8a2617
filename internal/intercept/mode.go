package intercept

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// chooseMode says how an agent gets into the pods.
func (i *Intercept) chooseMode() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.status.Mode, i.status.ModeReason = api.ModeEphemeral, "asked for"
	return nil
}

// ensureAgent finds our agent in the pod, or adds one, and gives its container's name.
func (i *Intercept) ensureAgent(ctx context.Context, pod *corev1.Pod) (string, error) {
	if name := sidecarOf(pod, i.identity.hash); name != "" {
		return name, nil
	}
	return i.pods.Inject(ctx, pod, cluster.Agent{Image: i.image, Owner: i.identity.hash, OwnerName: i.cfg.Owner})
}
