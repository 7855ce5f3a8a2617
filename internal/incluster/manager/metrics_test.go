package manager

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/incluster/manager/session"
	"kubevpn/internal/process/metrics"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/transport"
)

func TestMetricsFollowTheConventions(t *testing.T) {
	m := New(Config{Logger: slog.New(slog.DiscardHandler)})
	if problems, err := testutil.CollectAndLint(m.collector()); err != nil || len(problems) > 0 {
		t.Error(err, problems)
	}
}

// A scrape shows the bytes of current sessions and of ended ones.
func TestMetricsCountBytesOfAllSessions(t *testing.T) {
	l := managertest.Listen(t)
	m := start(t, Config{}, func(m *Manager) { m.metrics = l })
	pod := managertest.Listen(t)
	go func() {
		for {
			conn, err := pod.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				io.Copy(conn, conn)
			}()
		}
	}()
	managertest.Hello(t, m.laptop, helloV1).Next()
	echo := func(s *transport.Session) {
		t.Helper()
		st, err := s.Open(t.Context(), transport.Request{Proto: transport.ProtoTCP,
			Dst: netip.MustParseAddrPort(pod.Addr().String())})
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		if _, err := st.Write(make([]byte, 100_000)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(st, make([]byte, 100_000)); err != nil {
			t.Fatal(err)
		}
	}
	echo(m.laptop)
	url := "http://" + l.Addr().String() + "/metrics"
	page := scrape(t, url)
	for _, line := range []string{
		`kubevpn_manager_sessions 1`, `kubevpn_manager_sent_bytes_total 1\d{5}`,
		`kubevpn_manager_received_bytes_total 1\d{5}`,
		`kubevpn_manager_dials_total\{protocol="tcp",result="connected"\} 1`,
		`kubevpn_manager_balancer_picks_total\{result="not_a_service"\} 1`,
		`kubevpn_manager_resource_limit\{resource="streams"\} 24576`, `go_goroutines \d+`,
	} {
		if !regexp.MustCompile("(?m)^" + line + "$").MatchString(page) {
			t.Errorf("no line matches %s in\n%s", line, page)
		}
	}
	m.laptop.Close()
	testenv.Eventually(t, managertest.Timeout, func() error {
		sessions, total := m.sessions.Traffic()
		if sessions == 0 && total.Sent > 100_000 && total.Received > 100_000 {
			return nil
		}
		return fmt.Errorf("after the end of the session there are %d sessions and the traffic %v", sessions, total)
	})
	other, err := http.Get("http://" + l.Addr().String() + "/debug/pprof/")
	if err != nil {
		t.Fatal(err)
	}
	other.Body.Close()
	if other.StatusCode != http.StatusNotFound {
		t.Errorf("another path returns %s", other.Status)
	}
}

// scrape returns the page.
func scrape(t *testing.T, url string) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var page bytes.Buffer
	if _, err := page.ReadFrom(r.Body); err != nil || r.StatusCode != http.StatusOK {
		t.Fatal(r.Status, err, page.String())
	}
	return page.String()
}

// Every metric that the reference lists appears in a scrape, and no other one of kubevpn.
func TestAllMetricsAreListed(t *testing.T) {
	m := New(Config{Logger: slog.New(slog.DiscardHandler)})
	var err error
	if m.proxy, err = session.NewProxyPort(managertest.Listen(t), m.log); err != nil {
		t.Fatal(err)
	}
	m.proxy.CountRejected(authlistener.NoTLS, &net.TCPAddr{})
	l := managertest.Listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- metrics.Serve(ctx, "metrics", l, metrics.Handler(m.collector())) }()
	page := scrape(t, "http://"+l.Addr().String()+"/metrics")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, one := range Metrics() {
		if !strings.Contains(page, "\n# TYPE "+one.Name+" ") {
			t.Errorf("%s is missing in\n%s", one.Name, page)
		}
		page = strings.ReplaceAll(page, "# TYPE "+one.Name+" ", "")
	}
	if strings.Contains(page, "# TYPE kubevpn") {
		t.Errorf("metrics that Metrics does not return:\n%s", page)
	}
}
