package workloads

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
)

// Untold names the probes that run a command in the pod whose connections an agent cannot tell from calls of other
// containers, like "the livenessProbe of container app". container is the intercepted one.
func Untold(p *corev1.Pod, container string) []string {
	_, untold := describe(p.Spec, container)
	return untold
}

// describe returns what an ephemeral agent must know of its pod. Probes of gRPC, and of HTTP unless the spec sets a
// User-Agent, are known by theirs. Those that run a command in the intercepted container are told by its user, if no
// other container may have the same; those in others make the same calls as their container.
func describe(spec corev1.PodSpec, container string) (pod api.AgentPod, untold []string) {
	all := serving(spec)
	pod.Within = len(all) > 1
	for _, c := range all {
		user := userOf(spec, c)
		alone := c.Name == container && user >= 0 && !slices.ContainsFunc(all, func(o corev1.Container) bool {
			is := userOf(spec, o)
			return o.Name != c.Name && (is == user || is < 0)
		})
		for n, p := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			switch {
			case p == nil, p.Exec != nil && !pod.Within:
			case p.Exec != nil && alone:
				pod.Users = append(pod.Users, uint32(user))
			case p.Exec != nil:
				kind := [...]string{"startupProbe", "livenessProbe", "readinessProbe"}[n]
				untold = append(untold, fmt.Sprintf("the %s of container %s", kind, c.Name))
			default:
				pod.Checks = append(pod.Checks, checks(c, p.ProbeHandler)...)
			}
		}
	}
	return pod, untold
}

// userOf returns the user of a container's processes; -1: the image decides.
func userOf(spec corev1.PodSpec, c corev1.Container) int64 {
	pod, own := ptr.Deref(spec.SecurityContext, corev1.PodSecurityContext{}),
		ptr.Deref(c.SecurityContext, corev1.SecurityContext{})
	return ptr.Deref(own.RunAsUser, ptr.Deref(pod.RunAsUser, -1))
}

// checks returns the connections of a probe, if its User-Agent does not show them.
func checks(c corev1.Container, p corev1.ProbeHandler) []httpmatch.Check {
	number := func(port intstr.IntOrString) uint16 { // a name is one of the container's own ports
		n, _ := targetPort(corev1.PodSpec{Containers: []corev1.Container{c}}, corev1.ServicePort{TargetPort: port})
		return uint16(n)
	}
	switch {
	case p.TCPSocket != nil:
		return []httpmatch.Check{{Scheme: httpmatch.CheckConnect, Port: number(p.TCPSocket.Port)}}
	case p.HTTPGet != nil:
		header := make(http.Header)
		for _, h := range p.HTTPGet.HTTPHeaders {
			header.Add(h.Name, strings.TrimSpace(h.Value))
		}
		header.Del("Host") // a redirect loses it
		if header["User-Agent"] != nil || p.HTTPGet.Scheme == corev1.URISchemeHTTPS {
			return []httpmatch.Check{{Scheme: strings.ToLower(string(p.HTTPGet.Scheme)),
				Port: number(p.HTTPGet.Port), URI: "/" + strings.TrimPrefix(p.HTTPGet.Path, "/"), Header: header}}
		}
	}
	return nil
}
