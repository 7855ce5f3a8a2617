package chart_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager"
)

// checkMetrics checks that the ServiceMonitor leads to the port on which the manager serves its metrics.
func checkMetrics(t *testing.T, all map[string]unstructured.Unstructured) {
	t.Helper()
	var d appsv1.Deployment
	decode(t, all["Deployment kubevpn-traffic-manager"], &d)
	container := d.Spec.Template.Spec.Containers[0]
	cmd := manager.NewCommand()
	if err := cmd.ParseFlags(container.Args[1:]); err != nil {
		t.Fatal(err)
	}
	if got, want := cmd.Flag("metrics-listen").Value.String(), fmt.Sprint(":", api.MetricsPort); got != want {
		t.Errorf("the manager listens on %q, want %q", got, want)
	}
	port := corev1.ContainerPort{Name: "metrics", ContainerPort: api.MetricsPort, Protocol: corev1.ProtocolTCP}
	if !slices.Contains(container.Ports, port) {
		t.Errorf("the ports are %v", container.Ports)
	}
	var s corev1.Service
	decode(t, all["Service kubevpn-traffic-manager-metrics"], &s)
	if p := s.Spec.Ports; len(p) != 1 || p[0].Name != "metrics" || p[0].Port != api.MetricsPort ||
		p[0].TargetPort.StrVal != "metrics" || s.Spec.Type != "" {
		t.Errorf("the Service is %+v", s.Spec)
	}
	monitor := all["ServiceMonitor kubevpn-traffic-manager"]
	selector, _, err := unstructured.NestedStringMap(monitor.Object, "spec", "selector", "matchLabels")
	if err != nil || len(selector) != 2 {
		t.Errorf("the ServiceMonitor selects %v, %v", selector, err)
	}
	direct := all["Service kubevpn-traffic-manager-direct"].Object["metadata"].(map[string]any)["labels"].(map[string]any)
	other := 0
	for key, value := range selector {
		if s.Labels[key] != value {
			t.Errorf("the Service lacks the label %s=%s", key, value)
		}
		if direct[key] != value {
			other++
		}
	}
	if other == 0 {
		t.Errorf("the ServiceMonitor also selects the Service of the transport direct: %v", selector)
	}
	endpoints := fmt.Sprint(monitor.Object["spec"].(map[string]any)["endpoints"])
	if endpoints != "[map[interval:1m path:/metrics port:metrics]]" || monitor.GetLabels()["release"] != "prometheus" {
		t.Errorf("the ServiceMonitor has the endpoints %s and the labels %v", endpoints, monitor.GetLabels())
	}
	var board corev1.ConfigMap
	decode(t, all["ConfigMap kubevpn-dashboard"], &board)
	if board.Labels["dashboards"] != "yes" {
		t.Errorf("the dashboard has the labels %v", board.Labels)
	}
	checkDashboard(t, board.Data["kubevpn.json"])
}

// checkDashboard checks that the manager exports each metric of the queries, and that each of its metrics is shown.
func checkDashboard(t *testing.T, text string) {
	t.Helper()
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(text), &board); err != nil {
		t.Fatal(err)
	}
	exported := map[string]bool{"process_resident_memory_bytes": true} // of the Go client
	for _, m := range manager.Metrics() {
		exported[m.Name] = false
	}
	names := regexp.MustCompile(`\b(?:kubevpn|process|go)_[a-z_]+`)
	for _, p := range board.Panels {
		if len(p.Targets) == 0 {
			t.Errorf("the panel %q has no query", p.Title)
		}
		for _, target := range p.Targets {
			found := names.FindAllString(target.Expr, -1)
			if len(found) == 0 {
				t.Errorf("the panel %q has a query without a metric: %s", p.Title, target.Expr)
			}
			for _, name := range found {
				if _, ok := exported[name]; !ok {
					t.Errorf("the panel %q needs %s, which the manager does not export", p.Title, name)
				}
				exported[name] = true
			}
		}
	}
	for name, shown := range exported {
		if !shown {
			t.Errorf("no panel shows %s", name)
		}
	}
}

func TestServiceMonitorNeedsMetrics(t *testing.T) {
	out, err := helm(t, "template", "vpn", chart, "--set", "image.repository=kubevpn",
		"--set", "metrics.serviceMonitor.enabled=true").CombinedOutput()
	if err == nil || !regexp.MustCompile("needs metrics.enabled=true").Match(out) {
		t.Errorf("got %v: %s", err, out)
	}
}
