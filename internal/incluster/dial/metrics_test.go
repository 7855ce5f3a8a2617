package dial

import (
	"context"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

func TestMetricsCountResultsOfDials(t *testing.T) {
	d := New(balancer.New(""))
	for _, err := range []error{nil, syscall.ECONNREFUSED, io.EOF, context.Canceled, syscall.ETIMEDOUT, nil} {
		d.counts.began(transport.ProtoTCP)(err)
	}
	d.counts.began(transport.ProtoUDP)
	c := metrics.New(Metrics(), d.Collect)
	if problems, err := testutil.CollectAndLint(c); err != nil || len(problems) > 0 {
		t.Error(err, problems)
	}
	var want strings.Builder
	want.WriteString("# HELP kubevpn_manager_dials_in_flight " + metricDialing.Help + "\n" +
		"# TYPE kubevpn_manager_dials_in_flight gauge\nkubevpn_manager_dials_in_flight 1\n" +
		"# HELP kubevpn_manager_dials_total " + metricDials.Help + "\n# TYPE kubevpn_manager_dials_total counter\n")
	counts := map[string]string{"connected": "2", "refused": "1", "failed": "1", "canceled": "1", "timeout": "1"}
	for _, protocol := range []string{"tcp", "udp", "echo"} {
		for _, result := range dialResults {
			n := "0"
			if count, ok := counts[result]; ok && protocol == "tcp" {
				n = count
			}
			want.WriteString(`kubevpn_manager_dials_total{protocol="` + protocol + `",result="` + result + `"} ` + n + "\n")
		}
	}
	if err := testutil.CollectAndCompare(c, strings.NewReader(want.String()), metricDials.Name,
		metricDialing.Name); err != nil {
		t.Error(err)
	}
}
