//go:build linux

package daemon

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/pkg/protocol/dns"
)

// withMetrics is a request that asks for metrics at an address.
func withMetrics(at string) api.ConnectRequest {
	return api.ConnectRequest{Settings: []api.Setting{{Key: string(config.KeyMetricsListen), Value: at}}}
}

func TestDaemonMetricsFollowTheConventions(t *testing.T) {
	cs := newConnections(nil, nil, Owner{}, slog.New(slog.DiscardHandler))
	for range 3 {
		cs.queries.Observe(dns.Query{Zone: "c1", From: dns.FromCache, Rcode: "NOERROR"})
	}
	cs.queries.Observe(dns.Query{From: dns.FromNameserver, Rcode: "NOERROR"}) // private: it is not counted
	fake := &fakeConnection{}
	task := &connectionTask{id: "3f2a91c04b7e", conn: fake, network: &scopedNetwork{host: &hostNetwork{}}}
	cs.tasks[task.id] = task
	if problems, err := testutil.CollectAndLint(cs.collector()); err != nil || len(problems) > 0 {
		t.Error(err, problems)
	}
	want := `# HELP kubevpn_daemon_dns_queries_total ` + metricQueries.Help + `
# TYPE kubevpn_daemon_dns_queries_total counter
kubevpn_daemon_dns_queries_total{answered_by="cache",rcode="NOERROR"} 3
# HELP kubevpn_daemon_streams ` + metricStreams.Help + `
# TYPE kubevpn_daemon_streams gauge
kubevpn_daemon_streams{connection="3f2a91c04b7e"} 2
`
	if err := testutil.CollectAndCompare(cs.collector(), strings.NewReader(want), metricQueries.Name,
		metricStreams.Name); err != nil {
		t.Error(err)
	}
}

func TestDaemonServesMetricsOnlyWhereAsked(t *testing.T) {
	cs := newConnections(nil, nil, Owner{}, slog.New(slog.DiscardHandler))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().String()
	if err := cs.serveMetrics(withMetrics(at)); err == nil || !strings.Contains(err.Error(), "use another port") {
		t.Errorf("a port that is in use: %v", err)
	}
	l.Close()
	if err := cs.serveMetrics(withMetrics("0.0.0.0:9464")); err == nil {
		t.Error("metrics are served on all addresses")
	}
	for _, at := range []string{"", at, at, ""} {
		if err := cs.serveMetrics(withMetrics(at)); err != nil {
			t.Errorf("%q: %v", at, err)
		}
	}
	if err := cs.serveMetrics(withMetrics("127.0.0.1:1")); err == nil || !strings.Contains(err.Error(), "kubevpn quit") {
		t.Errorf("another address: %v", err)
	}
	get := func(host string) (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+at+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		page, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, string(page)
	}
	if code, page := get(at); code != http.StatusOK ||
		!strings.Contains(page, "\nkubevpn_daemon_connections{status=\"connected\"} 0\n") {
		t.Errorf("%d: %s", code, page)
	}
	if code, _ := get("rebinding.example"); code != http.StatusForbidden {
		t.Errorf("a page of another site gets %d", code)
	}
	if err := cs.shutDown(func(api.Event) {}); err != nil {
		t.Error(err)
	}
	cs.group.Wait()
	if conn, err := net.Dial("tcp", at); err == nil {
		conn.Close()
		t.Error("the port is open after the end")
	}
}
