package intercept

import (
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
)

// sidecarOf returns the name of the sidecar container of the owner whose key has that hash, or "".
func sidecarOf(p *corev1.Pod, hash string) string {
	for _, c := range p.Spec.Containers {
		owned := slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool {
			return v.Name == api.AgentOwnerVariable && v.Value == hash
		})
		if api.IsAgent(c.Name) && owned {
			return c.Name
		}
	}
	return ""
}

// otherAgents returns the names of the agents' containers of the pod, except one.
func otherAgents(p *corev1.Pod, except string) []string {
	names := slices.Concat(api.Texts(p.Spec.Containers, func(c corev1.Container) string { return c.Name }),
		api.Texts(p.Spec.EphemeralContainers, func(c corev1.EphemeralContainer) string { return c.Name }))
	return slices.DeleteFunc(names, func(name string) bool { return !api.IsAgent(name) || name == except })
}

// parseInfo parses a line of an agent's log. ok is false for a line that is not an AgentInfo.
func parseInfo(line string) (g api.AgentInfo, ok bool) {
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &g) != nil {
		return g, false
	}
	return g, g.Error != nil || g.Protocol != 0 && g.Key != "" && g.Port != 0
}
