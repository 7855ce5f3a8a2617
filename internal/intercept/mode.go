package intercept

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

func (i *Intercept) agent() cluster.Agent {
	return cluster.Agent{Image: i.image, Owner: i.identity.hash, OwnerName: i.cfg.Owner}
}

// chooseMode decides how an agent gets into the pods, before any pod is touched.
//
//	asked for     ephemeral container admitted     pods are made from a template     mode
//	ephemeral     any                              any                               ephemeral
//	sidecar       any                              yes                               sidecar
//	sidecar       any                              no                                error
//	auto          yes, or there is no pod to ask   any                               ephemeral
//	auto          no                               yes                               sidecar
//	auto          no                               no                                the refusal
func (i *Intercept) chooseMode(ctx context.Context) error {
	asked := i.cfg.Spec.Mode
	done := i.step("Choosing how the agent gets into the pods")
	mode, reason := api.ModeEphemeral, "asked for"
	switch asked {
	case api.ModeEphemeral:
	case api.ModeSidecar:
		if err := rollsOut(i.workload); err != nil {
			return err
		}
		mode = api.ModeSidecar
	default:
		pod, err := i.somePod(ctx)
		if err != nil {
			return err
		}
		if pod == nil {
			reason = "no pod runs on which another way could be tried"
			break
		}
		refusal := i.pods.MayInject(ctx, pod, i.agent())
		switch {
		case refusal == nil:
			reason = "an ephemeral container with NET_ADMIN is admitted"
		case errors.Is(refusal, cluster.ErrPodGone), !refusedInjection(refusal), rollsOut(i.workload) != nil:
			return refusal
		default:
			mode, reason = api.ModeSidecar, refusal.Error()
		}
	}
	i.mu.Lock()
	i.status.Mode, i.status.ModeReason = mode, reason
	i.move()
	i.mu.Unlock()
	done("%s: %s", mode, reason)
	if mode == api.ModeSidecar {
		return i.rollOut(ctx)
	}
	return nil
}

// refusedInjection reports whether err is the cluster's or an admin's decision, which a sidecar gets around.
func refusedInjection(err error) bool {
	code := api.AsError(err).Code
	return code == api.ExitInject || code == api.ExitPermission
}

// somePod waits for the pods, and gives one that runs, or nil.
func (i *Intercept) somePod(ctx context.Context) (pod *corev1.Pod, err error) {
	err = i.await(ctx, func() bool {
		for _, c := range i.sorted() {
			if c.runs() {
				pod = c.pod
				break
			}
		}
		return i.listed
	})
	return pod, err
}

// sidecar reports whether agents come with the pods' template; i.mu is held.
func (i *Intercept) sidecar() bool { return i.status.Mode == api.ModeSidecar }

// ensureAgent finds our agent in the pod, or adds one, and gives its container's name.
func (i *Intercept) ensureAgent(ctx context.Context, pod *corev1.Pod) (string, error) {
	if err := i.ownNetwork(&pod.Spec); err != nil { // what the template did not tell
		return "", err
	}
	if name := sidecarOf(pod, i.identity.hash); name != "" {
		return name, nil
	}
	i.mu.Lock()
	sidecar := i.sidecar()
	i.mu.Unlock()
	if sidecar { // placed has seen the agent
		return "", fmt.Errorf("the pod %s has no agent in its template", pod.Name)
	}
	return i.pods.Inject(ctx, pod, i.agent())
}
