package daemon

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

func TestResolveNeedsNoClusterForBuiltinKinds(t *testing.T) {
	for asked, want := range map[string]string{
		"deploy/web": "deployment/web", "deployments.apps/web": "deployment/web", "sts/db": "statefulset/db",
		"ds/each": "daemonset/each", "rs/web-1": "replicaset/web-1", "po/web-1-x": "pod/web-1-x", "svc/web": "service/web",
	} {
		got, err := NewInterceptor().Resolve(t.Context(), api.ConnectRequest{}, asked) // no kubeconfig: nobody can be asked
		if err != nil || got != want {
			t.Errorf("%s is %q, %v; want %s", asked, got, err, want)
		}
	}
	if _, err := NewInterceptor().Resolve(t.Context(), api.ConnectRequest{}, "rollout/web"); err == nil {
		t.Error("a custom resource was understood without its cluster")
	}
}

func TestAgentImage(t *testing.T) {
	if got := agentImage(api.ConnectRequest{Image: config.Default().Image}); got != "" {
		t.Errorf("where no image was asked for: %q, want the traffic manager's", got)
	}
	if got := agentImage(api.ConnectRequest{Image: "r.example/k:1"}); got != "r.example/k:1" {
		t.Errorf("image = %q, want the one that was asked for", got)
	}
}

func TestImageOfAgent(t *testing.T) {
	ephemeral := func(name, image string) corev1.EphemeralContainer {
		return corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: name, Image: image}}
	}
	tests := []struct {
		name string
		spec corev1.PodSpec
		want string
	}{
		{"none", corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "app:1"}}, EphemeralContainers: []corev1.EphemeralContainer{ephemeral("debugger-1", "busybox")}}, ""},
		{"newest", corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{ephemeral("kubevpn-agent-1", "k:1"), ephemeral("kubevpn-agent-2", "k:2"), ephemeral("debugger-1", "busybox")}}, "k:2"},
		{"sidecar", corev1.PodSpec{Containers: []corev1.Container{{Name: "kubevpn-agent-1", Image: "k:1"}}}, "k:1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := imageOfAgent(&tt.spec); got != tt.want {
				t.Errorf("image = %q, want %q", got, tt.want)
			}
		})
	}
}
