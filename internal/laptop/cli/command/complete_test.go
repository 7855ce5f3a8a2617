package command

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// namespaceServer returns a Factory whose kubeconfig names an API server with Deployments in the namespace shop.
func namespaceServer(t *testing.T) *Factory {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(v); err != nil {
			t.Error(err)
		}
	}
	mux.HandleFunc("GET /apis/apps/v1/namespaces/shop/deployments", func(w http.ResponseWriter, r *http.Request) {
		list := appsv1.DeploymentList{TypeMeta: metav1.TypeMeta{Kind: "DeploymentList", APIVersion: "apps/v1"}}
		for _, name := range []string{"api", "web"} {
			list.Items = append(list.Items, appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		answer(w, list)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s is forbidden"}`, r.URL.Path)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := strings.Replace(kubeconfigOf(server.URL), "NAMESPACE", "shop", 1)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", path)
	return &Factory{Lookup: os.LookupEnv}
}

func kubeconfigOf(server string) string {
	return `apiVersion: v1
kind: Config
current-context: here
clusters: [{name: lab, cluster: {server: "` + server + `"}}]
users: [{name: ann, user: {token: t}}]
contexts: [{name: here, context: {cluster: lab, user: ann, namespace: NAMESPACE}}]
`
}

func TestCompletionOffersTypesAndNames(t *testing.T) {
	f := namespaceServer(t)
	types := []string{"deployment/", "statefulset/", "daemonset/", "replicaset/", "replicationcontroller/", "service/", "pod/"}
	tests := []struct {
		name      string
		command   string
		args      []string
		begun     string
		want      []string
		directive cobra.ShellCompDirective
	}{
		{"nothing", "proxy", nil, "", types, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp},
		{"no_requests", "clone", nil, "c", []string{"cronjob/"}, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp},
		{"type", "proxy", nil, "st", []string{"statefulset/"}, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp},
		{"short_type", "proxy", nil, "sv", []string{"svc/"}, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp},
		{"name", "proxy", nil, "deployment/", []string{"deployment/api", "deployment/web"}, cobra.ShellCompDirectiveNoFileComp},
		{"second_name", "proxy", []string{"deploy/api"}, "deploy/", []string{"deploy/web"}, cobra.ShellCompDirectiveNoFileComp},
		{"forbidden", "proxy", nil, "sts/", nil, cobra.ShellCompDirectiveError},
		{"unknown_type", "proxy", nil, "banana/", nil, cobra.ShellCompDirectiveNoFileComp},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cmd := &cobra.Command{Use: tt.command}
			cmd.SetContext(t.Context())
			var kube ClusterFlags
			kube.AddTo(cmd, f)
			got, directive := kube.CompleteWorkloads(cmd, tt.args, tt.begun)
			if diff := cmp.Diff(tt.want, got); diff != "" || directive != tt.directive {
				t.Errorf("directive %d, (-want +got):\n%s", directive, diff)
			}
		})
	}
}
