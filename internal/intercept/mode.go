package intercept

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

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

// podAgent is our agent in a pod.
type podAgent struct {
	container string
	greet     uint16 // where it greets, besides in its log; 0: nowhere
	old       bool   // it was there, and may be about to end
	sidecar   bool   // it came with the pod, and ends with it
}

// ensureAgent finds our agent in the pod, or adds one. Those that are spent do not count.
func (i *Intercept) ensureAgent(ctx context.Context, pod *corev1.Pod, spent []string) (podAgent, error) {
	if name := sidecarOf(pod, i.identity.hash); name != "" {
		return podAgent{container: name, sidecar: true}, nil
	}
	i.mu.Lock()
	sidecar := i.sidecar()
	i.mu.Unlock()
	if sidecar { // placed has seen the agent
		return podAgent{}, fmt.Errorf("the pod %s has no agent in its template", pod.Name)
	}
	a := i.agent()
	a.Spent = spent
	if i.claim.TLS == nil { // the application's key is for the container that the log is of
		a.Greet = greetPort(pod)
	}
	name, added, err := i.pods.Inject(ctx, pod, a)
	if err != nil || !added {
		return podAgent{container: name, old: true}, err
	}
	return podAgent{container: name, greet: a.Greet}, nil
}

// greetPort is a port that probably nobody in the pod has: below those that kernels give to connections, and none that a
// container declares.
func greetPort(p *corev1.Pod) uint16 {
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
