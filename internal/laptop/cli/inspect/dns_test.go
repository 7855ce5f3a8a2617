package inspect

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/term"
)

func TestDNSPrintsRowsThatFitTheHead(t *testing.T) {
	q := api.DNSQuery{
		Name: "web\x1b[2J\n", Type: "A", Network: "udp", From: "cluster", Server: netip.MustParseAddrPort("10.96.0.10:53"),
		Connection: "3f2a91c04b7e", Domain: "cluster.local", Rcode: "NOERROR", Seconds: 0.0123,
		Answers: []string{"CNAME web.default.svc.cluster.local.", "A 10.96.0.80"}, Records: 3, Missed: 7,
	}
	for format, want := range map[string]string{
		"table": "web[2J A cluster NOERROR 12.3 ms CNAME web.default.svc.cluster.local., A 10.96.0.80, and 1 more",
		"wide": "web[2J A cluster 10.96.0.10:53 3f2a91c04b7e cluster.local udp NOERROR 12.3 ms CNAME web.default.svc.cluster.local., " +
			"A 10.96.0.80, and 1 more",
	} {
		var out bytes.Buffer
		o := &dnsOptions{output: term.NewFormat(format)}
		o.printHead(&out)
		o.printRow(&out, q)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 3 || !strings.HasPrefix(lines[1], "! 7 queries are missing") {
			t.Fatalf("%s:\n%s", format, out.String())
		}
		if got := strings.Join(strings.Fields(lines[2])[1:], " "); got != want {
			t.Errorf("%s: %q, want %q", format, got, want)
		}
		for _, column := range []struct{ head, cell string }{{"NAME", "web"}, {"ANSWER", "CNAME"}} {
			if strings.Index(lines[0], column.head) != strings.Index(lines[2], column.cell) {
				t.Errorf("%s: %s and %s are not in one column:\n%s", format, column.head, column.cell, out.String())
			}
		}
	}
}
