package daemon

import (
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

func TestWorkloadRequiresNoClusterForBuiltinKinds(t *testing.T) {
	for asked, want := range map[string]string{
		"deploy/web": "deployment/web", "deployments.apps/web": "deployment/web", "sts/db": "statefulset/db",
		"ds/each": "daemonset/each", "rs/web-1": "replicaset/web-1", "po/web-1-x": "pod/web-1-x", "svc/web": "service/web",
	} {
		got, err := factory{}.Workload(t.Context(), api.ConnectRequest{}, asked) // no kubeconfig: nobody can be asked
		if err != nil || got != want {
			t.Errorf("%s is %q, %v; want %s", asked, got, err, want)
		}
	}
	if _, err := (factory{}).Workload(t.Context(), api.ConnectRequest{}, "rollout/web"); err == nil {
		t.Error("a custom resource was understood without its cluster")
	}
}

func TestAgentImageDefaultsToThatOfTheManager(t *testing.T) {
	if got := agentImage(config.Default().Image); got != "" {
		t.Errorf("where no image was asked for: %q, want the traffic manager's", got)
	}
	if got := agentImage("r.example/k:1"); got != "r.example/k:1" {
		t.Errorf("image = %q, want the one that was asked for", got)
	}
}
