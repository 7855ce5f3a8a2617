//go:build e2e && linux

package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// helmMetrics checks that the manager's metrics follow the conventions, and that they count what passes.
func helmMetrics(t *testing.T, w *world, l *laptop) {
	scrape := func() string {
		t.Helper()
		return w.kubectl(t, "get", "--raw",
			"/api/v1/namespaces/e2e-helm/services/kubevpn-traffic-manager-metrics:metrics/proxy/metrics")
	}
	before := scrape()
	lintMetrics(t, before)
	if _, err := l.get(t, "http://web.default.svc.cluster.local/"); err != nil {
		t.Fatal(err)
	}
	after := scrape()
	for _, series := range []string{
		"kubevpn_manager_sent_bytes_total", "kubevpn_manager_received_bytes_total",
		`kubevpn_manager_dials_total{protocol="tcp",result="connected"}`,
		`kubevpn_manager_balancer_picks_total{result="endpoint"}`,
	} {
		if a, b := metric(t, before, series), metric(t, after, series); b <= a {
			t.Errorf("%s was %v and is %v after a request", series, a, b)
		}
	}
	for series, want := range map[string]float64{
		"kubevpn_manager_sessions": 1, `kubevpn_manager_resource_used{resource="sessions"}`: 1,
		`kubevpn_manager_resource_limit{resource="sessions"}`: 1024,
	} {
		if got := metric(t, after, series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	if used := metric(t, after, `kubevpn_manager_resource_used{resource="memory_bytes"}`); used < 1<<20 {
		t.Errorf("the manager uses %v bytes", used)
	}
}

// proxyMetrics checks that the daemon's metrics follow the conventions, and that they count the requests of an intercept,
// queries and bytes. Only this machine reads them, by its own name.
func proxyMetrics(t *testing.T, l *laptop, s *shop, v *visitor) {
	const at = "127.0.0.1:9464"
	if r := l.run(t, "kubevpn", "connect", "--metrics-listen", "0.0.0.0:9464"); r.code != int(api.ExitUsage) {
		t.Errorf("all addresses: %v", r)
	}
	l.must(t, "kubevpn", "connect", "--metrics-listen", at)
	scrape := func() string {
		t.Helper()
		return l.must(t, "curl", "-sS", "--max-time", "20", "http://"+at+"/metrics")
	}
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	id := l.connection(t).ID
	intercepted := fmt.Sprintf(`kubevpn_daemon_intercepted_requests_total{connection=%q,destination="laptop",`+
		`mirror="false",namespace=%q,workload=%q}`, id, s.namespace, s.workload)
	before := scrape()
	lintMetrics(t, before)
	for _, ip := range s.ready(t) {
		if out, err := v.run(t, "curl", "-sS", "--max-time", "20", "-H", mine+": "+me, "http://"+ip+":8080/"); err != nil {
			t.Fatal(out, err)
		}
	}
	if _, err := l.get(t, "http://web.default.svc.cluster.local/"); err != nil {
		t.Fatal(err)
	}
	received := func(page string) (sum float64) {
		for _, transport := range []string{api.TransportPortForward, api.TransportAPIProxy, api.TransportDirect} {
			sum += metric(t, page, fmt.Sprintf("kubevpn_daemon_received_bytes_total{connection=%q,transport=%q}", id, transport))
		}
		return sum
	}
	testenv.Eventually(t, soon, func() error { // agents report five times a second at most
		after := scrape()
		if n, want := metric(t, after, intercepted), float64(len(s.ready(t))); n < want {
			return fmt.Errorf("%s is %v, want %v", intercepted, n, want)
		}
		if received(after) <= received(before) {
			return errors.New("the received bytes do not grow")
		}
		if !strings.Contains(after, "\nkubevpn_daemon_dns_queries_total{answered_by=\"cluster\",rcode=\"NOERROR\"} ") {
			return fmt.Errorf("no query is counted:\n%s", after)
		}
		return nil
	})
	forged := l.must(t, "curl", "-sS", "-H", "Host: rebinding.example", "http://"+at+"/metrics")
	if strings.Contains(forged, "kubevpn_daemon") {
		t.Errorf("another Host gets %s", forged)
	}
}

// lintMetrics checks a scrape as `promtool check metrics` does.
func lintMetrics(t *testing.T, page string) {
	t.Helper()
	problems, err := promlint.New(strings.NewReader(page + "\n")).Lint() // kubectl trims it
	if err != nil {
		t.Error(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "kubevpn_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// metric returns the value of a series in a scrape.
func metric(t *testing.T, page, series string) float64 {
	t.Helper()
	line := regexp.MustCompile("(?m)^" + regexp.QuoteMeta(series) + " (.+)$").FindStringSubmatch(page)
	if line == nil {
		t.Fatalf("no series %s in\n%s", series, page)
	}
	value, err := strconv.ParseFloat(line[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}
