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

// parseInfo parses a line of an agent's log. ok is false for a line that is not an AgentInfo.
func parseInfo(line string) (g api.AgentInfo, ok bool) {
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &g) != nil {
		return g, false
	}
	return g, g.Error != nil || g.Protocol != 0 && g.Key != "" && g.Port != 0
}
