//go:build e2e && linux

package e2e

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// worldPlaces sends requests to a program in a container of the laptop.
func worldPlaces(t *testing.T, l *laptop, s *shop) {
	within := l.container(t, netip.MustParsePrefix("172.30.9.0/24"))
	const host = "172.30.9.2"
	v, vip := s.visitor(t), s.clusterIP(t, s.namespace, "wide")
	mine := []string{"kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine + "=" + me}
	t.Run("refused", func(t *testing.T) {
		for place, message := range map[string]string{
			vip + ":80":               "requests cannot go to " + vip + ":80: .*leads into the cluster",
			"no-such-host.invalid:80": "requests cannot go to no-such-host.invalid:80: .*no such host",
		} {
			failure{code: api.ExitUsage, message: message, hint: "without the cluster", within: soon}.check(t,
				l.run(t, append(mine, "--port", "8080="+place)...))
		}
	})
	t.Run("nothing_listens", func(t *testing.T) {
		r := l.proxy(t, s, mine[5], mine[6], "--port", "8080="+host+":8080")
		defer l.leave(t, s)
		if !strings.Contains(r.stderr+r.stdout, "no program answers at "+host+":8080 now: ") {
			t.Errorf("no warning: %v", r)
		}
		r = l.run(t, "kubevpn", "why", "http://"+vip+"/", "-H", "x-user: me")
		if r.code != int(api.ExitLocalPort) || !strings.Contains(r.stdout, "nothing listens on "+host+":8080") {
			t.Error(r)
		}
	})
	l.background(t, append(within, filepath.Join(bin, "app"), "-name", "container", "-host", host)...)
	for _, place := range []string{"8080=" + host + ":8080", "http=" + host + ":8080"} {
		t.Run(strings.NewReplacer("=", "_", ":", "_").Replace(place), func(t *testing.T) {
			r := l.proxy(t, s, mine[5], mine[6], "--port", place, "--port", "udp/9001="+host+":9001")
			defer l.leave(t, s)
			if !strings.Contains(r.stdout, "8080 (http) → "+host+":8080") {
				t.Errorf("proxy prints no place: %v", r)
			}
			testenv.Eventually(t, soon, func() error { return v.want("http://"+vip+"/", "container", "x-user", me) })
			if err := v.want("http://"+vip+"/", "laptop", "x-user", me); err == nil {
				t.Error("the laptop answers")
			}
			if ports := l.intercept(t).Ports; ports[0].Host != host || ports[0].Local != 8080 {
				t.Errorf("status has the ports %+v", ports)
			}
			if r := l.run(t, "kubevpn", "status"); !strings.Contains(r.stdout, "8080="+host+":8080") {
				t.Error(r)
			}
			if r := l.run(t, "kubevpn", "why", "http://"+vip+"/", "-H", "x-user: me"); r.code != 0 ||
				!strings.Contains(r.stdout, "the program on "+host+":8080 has it") {
				t.Error(r)
			}
		})
	}
}
