package intercept

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
)

func (i *Intercept) agent() workloads.Agent {
	return workloads.Agent{Image: i.image, Owner: i.identity.hash, OwnerName: i.cfg.Owner, Container: i.container,
		Objects: i.cfg.Objects}
}

// chooseMode chooses how agents get into the pods, before the intercept changes any pod.
//
//	requested     ephemeral container admitted     a rollout replaces the pods       mode
//	ephemeral     any                              any                               ephemeral
//	sidecar       any                              yes                               sidecar
//	sidecar       any                              no                                error
//	auto          yes, or no pod runs              any                               ephemeral
//	auto          no                               yes                               sidecar
//	auto          no                               no                                the rejection
func (i *Intercept) chooseMode(ctx context.Context) error {
	if i.cfg.Exposed != nil {
		i.claim.Ports = i.cfg.Exposed.ports
		i.set(func() { i.status.Mode, i.status.ModeReason = api.ModeSidecar, "the pod has the agent alone" })
		return nil
	}
	requested := i.cfg.Spec.Mode
	done := i.step("Choosing how to add the agent")
	mode, reason := api.ModeEphemeral, "requested with "+cmp.Or(i.cfg.ModeSource, "--mode")
	switch requested {
	case api.ModeEphemeral:
	case api.ModeSidecar:
		if err := rollsOut(i.workload); err != nil {
			return err
		}
		mode = api.ModeSidecar
	default:
		var err error
		if mode, reason, err = i.chooseByPod(ctx); err != nil {
			return err
		}
	}
	if err := i.checkPull(ctx, mode); err != nil {
		return err
	}
	if mode == api.ModeSidecar {
		if err := i.checkSidecarWays(ctx, reason); err != nil {
			return err
		}
	}
	i.set(func() { i.status.Mode, i.status.ModeReason = mode, reason })
	done("%s: %s", mode, reason)
	if mode == api.ModeSidecar {
		return i.rollOut(ctx)
	}
	return nil
}

// maxGonePods is how many pods chooseByPod asks about that are deleted meanwhile.
const maxGonePods = 5

// chooseByPod chooses the mode for auto: it asks the API server whether one pod may get an ephemeral container. If that
// pod is deleted meanwhile, as in a rollout, it asks about another one.
func (i *Intercept) chooseByPod(ctx context.Context) (mode, reason string, err error) {
	gone := make(map[types.UID]bool)
	for {
		pod, err := i.somePod(ctx, gone)
		if err != nil {
			return "", "", err
		}
		if pod == nil {
			return api.ModeEphemeral, "no pod runs, so kubevpn could not check", nil
		}
		rejection := i.pods.MayInject(ctx, pod, i.agent())
		if rejection == nil {
			return api.ModeEphemeral, "the cluster allows an ephemeral container with NET_ADMIN", nil
		}
		switch e := api.AsError(rejection); {
		case errors.Is(rejection, client.ErrPodGone) && len(gone) < maxGonePods:
			i.log.Info("asking about another pod", "cause", rejection)
			gone[pod.UID] = true
		case errors.Is(rejection, client.ErrPodGone), e.Code != api.ExitInject && e.Code != api.ExitPermission:
			return "", "", rejection // neither a policy nor RBAC, which a sidecar avoids
		case rollsOut(i.workload) != nil:
			return "", "", e.WithHint("%s\nA sidecar is no way either: %v", e.Hint, rollsOut(i.workload))
		default:
			return api.ModeSidecar, rejection.Error(), nil
		}
	}
}

// checkPull returns an error if the pods cannot pull the agent's image, as far as the user can see.
func (i *Intercept) checkPull(ctx context.Context, mode string) error {
	if !i.private {
		return nil
	}
	var pod *corev1.Pod // a sidecar is in the pods of the next template
	if mode == api.ModeEphemeral {
		var err error
		if pod, err = i.somePod(ctx, nil); err != nil {
			return err
		}
	}
	return i.pods.ExplainContext(ctx, workloads.CheckPull(ctx, i.pods.Kube(), i.workload, pod, i.image))
}

// podAgent is the laptop's own agent in a pod.
type podAgent struct {
	container string
	infoPort  uint16 // where it serves its AgentInfo earlier than its log does; 0: nowhere
	old       bool   // it existed before this attempt, and may be about to end
	sidecar   bool   // its container belongs to the pod's template
}

// ensureAgent finds the laptop's agent in the pod, or adds one. It ignores the containers in replaced. In sidecar mode
// the pod has the agent: placed requires it.
func (i *Intercept) ensureAgent(ctx context.Context, pod *corev1.Pod, replaced []string) (podAgent, error) {
	if name := sidecarOf(pod, i.identity.hash); name != "" {
		return podAgent{container: name, sidecar: true}, nil
	}
	untold := workloads.Untold(pod, i.container)
	if len(untold) > 0 && i.via == nil && !i.claim.Match.Marks() && !i.claim.Mirror {
		i.warn(fmt.Sprintf("if %s asks an intercepted port within the pod, this machine receives that, as it does "+
			"calls of other containers; --headers, or a user of its own for the container, keeps it with the "+
			"application", strings.Join(untold, " or ")))
	}
	a := i.agent()
	a.Replaced = replaced
	if i.claim.TLS == nil { // only the log proves which container would receive the application's TLS key
		a.InfoPort = infoPort(pod)
	}
	a.Dials = i.via != nil
	name, added, err := i.pods.Inject(ctx, pod, a)
	if err != nil || !added {
		return podAgent{container: name, old: true}, err
	}
	return podAgent{container: name, infoPort: a.InfoPort}, nil
}

// infoPort returns a port that is probably free in the pod: it is below the ephemeral ports of kernels, and no
// container declares it.
func infoPort(p *corev1.Pod) uint16 {
	const first, last = 20000, 32767
	for {
		port := int32(first + rand.N(last-first+1))
		declares := func(c corev1.Container) bool {
			return slices.ContainsFunc(c.Ports, func(d corev1.ContainerPort) bool { return d.ContainerPort == port })
		}
		if !slices.ContainsFunc(p.Spec.Containers, declares) && !slices.ContainsFunc(p.Spec.InitContainers, declares) {
			return uint16(port)
		}
	}
}
