package dns

import (
	"context"
	"errors"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
)

func TestDigResolvesNames(t *testing.T) {
	t.Parallel()
	testenv.NeedPrograms(t, "dig")
	w := newWorld(t)
	dig := func(args ...string) string {
		args = append([]string{"@127.0.0.1", "-p", strconv.Itoa(int(w.addr.Port())), "+tries=1"}, args...)
		out, err := exec.CommandContext(t.Context(), "dig", args...).CombinedOutput()
		if err != nil {
			t.Errorf("dig %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	for args, want := range map[string]string{
		"+short web":                 "web.default.svc.cluster.local.\n10.96.0.10\n",
		"+short +tcp web":            "web.default.svc.cluster.local.\n10.96.0.10\n",
		"+short +noedns web":         "web.default.svc.cluster.local.\n10.96.0.10\n",
		"+short +dnssec web":         "web.default.svc.cluster.local.\n10.96.0.10\n",
		"+short +nocookie web":       "web.default.svc.cluster.local.\n10.96.0.10\n",
		"+short web.billing A":       "web.billing.svc.cluster.local.\n10.96.0.11\n",
		"+short web AAAA":            "web.default.svc.cluster.local.\n",
		"+short web HTTPS":           "web.default.svc.cluster.local.\n",
		"+short docs":                "docs.default.svc.cluster.local.\nwww.example.com.\ncdn.example.net.\n192.0.2.1\n",
		"+short _http._tcp.web SRV":  "_http._tcp.web.default.svc.cluster.local.\n0 100 80 web.default.svc.cluster.local.\n",
		"+short -x 10.96.0.10":       "web.default.svc.cluster.local.\n",
		"+short -x 192.0.2.1":        "cdn.example.net.\n",
		"+short -x f244::6":          "db-1.db.default.svc.cluster.local.\n",
		"+short www.google.com":      "192.0.2.2\n",
		"+short +tcp www.google.com": "192.0.2.2\n",
		"+short +search nothing":     "",
	} {
		if got := dig(strings.Fields(args)...); got != want {
			t.Errorf("dig %s: got %q, want %q", args, got, want)
		}
	}
	if out := dig("web"); strings.Contains(out, "WARNING") || !strings.Contains(out, "status: NOERROR") || !strings.Contains(out, "flags: qr rd ra;") {
		t.Errorf("dig web:\n%s", out)
	}
	w.zone.Cluster = handlerFunc(brokenTunnel)
	w.setZones(t, w.zone)
	out := dig("web")
	if !strings.Contains(out, "status: SERVFAIL") || !strings.Contains(out, "EDE: 22 (No Reachable Authority): (lab: the session is reconnecting)") {
		t.Errorf("dig web with a broken tunnel:\n%s", out)
	}
}

func TestGoResolverResolvesNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, transport := range []string{"udp", "tcp"} {
		r := &net.Resolver{PreferGo: true, StrictErrors: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, transport, w.addr.String())
		}}
		for name, want := range map[string][]string{
			"web":                            {"10.96.0.10"},
			"web.billing":                    {"10.96.0.11"},
			"web.default.svc.cluster.local.": {"10.96.0.10"},
			"db":                             {"10.244.0.5", "10.244.0.6"},
			"db-0.db":                        {"10.244.0.5"},
			"dual":                           {"10.96.0.30", "fd00:96::30"},
			"docs":                           {"192.0.2.1"},
			"www.google.com":                 {"192.0.2.2"},
		} {
			got, err := r.LookupHost(t.Context(), name)
			slices.Sort(got)
			if diff := cmp.Diff(want, got); err != nil || diff != "" {
				t.Errorf("%s over %s: %v (-want +got):\n%s", name, transport, err, diff)
			}
		}
		if got, err := r.LookupCNAME(t.Context(), "web"); err != nil || got != "web.default.svc.cluster.local." {
			t.Errorf("CNAME over %s: %s, %v", transport, got, err)
		}
		if _, got, err := r.LookupSRV(t.Context(), "http", "tcp", "web.billing"); err != nil || len(got) != 1 || *got[0] != (net.SRV{Target: "web.billing.svc.cluster.local.", Port: 80, Weight: 100}) {
			t.Errorf("SRV over %s: %v, %v", transport, got, err)
		}
		if got, err := r.LookupAddr(t.Context(), "10.244.0.5"); err != nil || len(got) != 1 || got[0] != "db-0.db.default.svc.cluster.local." {
			t.Errorf("PTR over %s: %v, %v", transport, got, err)
		}
		if got, err := r.LookupTXT(t.Context(), "dns-version.cluster.local"); err != nil || len(got) != 1 || got[0] != "1.1.0" {
			t.Errorf("TXT over %s: %v, %v", transport, got, err)
		}
		var notFound *net.DNSError
		if _, err := r.LookupHost(t.Context(), "nothing.default.svc.cluster.local."); !errors.As(err, &notFound) || !notFound.IsNotFound {
			t.Errorf("over %s: %v", transport, err)
		}
	}
	w.zone.Cluster = handlerFunc(brokenTunnel)
	w.setZones(t, w.zone)
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, w.addr.String())
	}}
	var down *net.DNSError
	if _, err := r.LookupHost(t.Context(), "web.default.svc.cluster.local."); !errors.As(err, &down) || down.IsNotFound || !down.IsTemporary {
		t.Errorf("with a broken tunnel: %v", err)
	}
}
