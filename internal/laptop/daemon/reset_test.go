//go:build linux

package daemon

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

func TestResetReportsAnErrorOnce(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":"not found"}`)
	}))
	defer s.Close()
	kubeconfig := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: %q}}]}`, s.URL)
	c, err := client.Load([]byte(kubeconfig), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, workload := range []string{"gadgets/web", "gadgets.example.com/web"} { // a custom resource is looked up twice
		err := Reset(t.Context(), c, api.ResetRequest{Namespace: "shop", Workloads: []string{workload}},
			Owner{Name: "ann@laptop"}, func(api.Event) {}, slog.New(slog.DiscardHandler))
		if err == nil {
			t.Fatal("it was reset")
		}
		if lines := strings.Split(err.Error(), "\n"); len(lines) > 1 {
			t.Errorf("%d lines for one failure:\n%v", len(lines), err)
		}
	}
}
