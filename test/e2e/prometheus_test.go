//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/testenv"
)

// prometheusAnswers lets a Prometheus scrape the pods that the chart's ServiceMonitor selects, and checks that it has an
// answer to each query of the chart's dashboard. It runs on a node: the tunnel does not lead to the manager's own pod.
func prometheusAnswers(t *testing.T, r chartRelease, chart string) {
	root := testenv.Unpacked(t, "prometheus", "usr/bin/prometheus")
	dir, at := t.TempDir(), "127.0.0.1:9090"
	config := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(config, scrapeConfig(t, r, chart), 0o600); err != nil {
		t.Fatal(err)
	}
	server, err := r.Command(t.Context(), "node1", filepath.Join(root, "usr/bin/prometheus"), "--config.file="+config,
		"--web.listen-address="+at, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--log.level=warn")
	if err != nil {
		t.Fatal(err)
	}
	var log testenv.Buffer
	server.Stdout, server.Stderr = &log, &log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Kill() // it may have ended
		_ = server.Wait()         // killed
		if t.Failed() {
			t.Logf("Prometheus:\n%s", log.String())
		}
	})
	query := func(argv ...string) string {
		cmd, err := r.Command(t.Context(), "node1", argv...)
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Sprintf("%s: %v", out, err)
		}
		return string(out)
	}
	text := r.kubectl(t, "-n", "e2e-helm", "get", "configmap", "kubevpn-dashboard", "-o", `jsonpath={.data.kubevpn\.json}`)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(text), &dashboard); err != nil {
		t.Fatal(err)
	}
	// The variables as Grafana sets them for a scrape each second.
	variables := strings.NewReplacer("$namespace", "e2e-helm", "$__rate_interval", "4s")
	queries := 0
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			queries++
			testenv.Eventually(t, soon, func() error {
				answer := query(filepath.Join(root, "usr/bin/promtool"), "query", "instant", "-o", "json", "http://"+at,
					variables.Replace(target.Expr))
				var samples []struct{ Value [2]any } // the time, and the value as text
				if err := json.Unmarshal([]byte(answer), &samples); err != nil || len(samples) == 0 {
					return fmt.Errorf("the panel %q is empty: %s\n%s", panel.Title, answer,
						query("curl", "-sS", "http://"+at+"/api/v1/targets"))
				}
				for _, s := range samples {
					if s.Value[1] == "NaN" {
						return fmt.Errorf("the panel %q shows %s", panel.Title, answer)
					}
				}
				return nil
			})
		}
	}
	t.Logf("%d queries are answered", queries)
}

// scrapeConfig returns the configuration that the Prometheus Operator makes of the chart's ServiceMonitor, with a
// scrape each second. It lists the targets, because Debian's Prometheus is built without discovery in Kubernetes.
func scrapeConfig(t *testing.T, r chartRelease, chart string) []byte {
	t.Helper()
	out, err := r.helm(t, "template", "vpn", chart, "--show-only", "templates/metrics.yaml", "--set",
		"image.repository=kubevpn,metrics.enabled=true,metrics.serviceMonitor.enabled=true")
	if err != nil {
		t.Fatal(err, out)
	}
	objects := strings.Split(out, "\n---\n")
	i := slices.IndexFunc(objects, func(o string) bool { return strings.Contains(o, "kind: ServiceMonitor") })
	if i < 0 {
		t.Fatal(out)
	}
	var monitor monitoring.ServiceMonitor
	if err := yaml.UnmarshalStrict([]byte(objects[i]), &monitor); err != nil || len(monitor.Spec.Endpoints) != 1 {
		t.Fatalf("%v in\n%s", err, out)
	}
	var services corev1.ServiceList
	list := r.kubectl(t, "-n", monitor.Namespace, "get", "services", "-o", "json", "-l",
		labels.FormatLabels(monitor.Spec.Selector.MatchLabels))
	if err := json.Unmarshal([]byte(list), &services); err != nil || len(services.Items) != 1 {
		t.Fatalf("the ServiceMonitor selects %s, %v", list, err)
	}
	service := services.Items[0]
	pods := r.pods(t, service.Namespace, labels.FormatLabels(service.Spec.Selector))
	j := slices.IndexFunc(service.Spec.Ports, func(p corev1.ServicePort) bool { return p.Name == monitor.Spec.Endpoints[0].Port })
	if j < 0 || len(pods) != 1 {
		t.Fatalf("the ServiceMonitor leads to the pods %v and a port of %v", pods, service.Spec.Ports)
	}
	target := net.JoinHostPort(pods[0].String(), fmt.Sprint(service.Spec.Ports[j].Port))
	config, err := yaml.Marshal(map[string]any{"scrape_configs": []any{map[string]any{
		"job_name": "serviceMonitor", "scrape_interval": "1s", "scrape_timeout": "1s", "metrics_path": monitor.Spec.Endpoints[0].Path,
		"static_configs": []any{map[string]any{
			"targets": []string{target}, "labels": map[string]string{"namespace": service.Namespace, "service": service.Name},
		}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return config
}
