//go:build e2e && linux

package e2e

import (
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// runSuite checks that `kubevpn run` gives a program of a user without sudo the cluster's network, where this machine
// allows a network of its own and where it does not, and that nothing on the laptop changes.
func runSuite(t *testing.T, w *world) {
	root := w.newLaptop(t, lab.Admin)
	before := root.snapshot(t)
	l := w.laptopOf(t, eve)
	pod := w.pods(t, "default", "app=web")[0].String()
	for _, tt := range []struct {
		name   string
		within []string
		args   []string
		proxy  bool // the program's variables name one
	}{
		{"own_network", withDevice(0o666), nil, false},
		{"proxy_without_a_device", withDevice(0), nil, true},
		{"proxy_that_is_asked_for", withDevice(0o666), []string{"--socks", "127.0.0.1:0"}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l.within = tt.within
			run := func(command ...string) result {
				return l.run(t, append(append(append([]string{"kubevpn", "run"}, tt.args...), "--"), command...)...)
			}
			for _, address := range []string{"web", "web.default.svc.cluster.local", w.clusterIP(t, "default", "web"), pod + ":8080"} {
				if r := run("curl", "-sS", "--max-time", "20", "http://"+address+"/"); r.code != 0 || !strings.Contains(r.stdout, `"host":"web-`) {
					t.Errorf("%s: %v", address, r)
				}
			}
			if r := run("curl", "-sS", "--max-time", "20", "http://www.outside.test/"); !strings.Contains(r.stdout, "outside: GET") {
				t.Errorf("outside: %v", r)
			}
			r := run("sh", "-c", "env; exit 7")
			if r.code != 7 || strings.Contains(r.stdout, "HTTP_PROXY=http://kubevpn:") != tt.proxy {
				t.Errorf("%v\nwant exit 7, and a proxy: %v", r, tt.proxy)
			}
			if warned := strings.Contains(r.stderr, "programs that ignore HTTP_PROXY"); warned != (tt.proxy && tt.args == nil) {
				t.Errorf("the kinds of programs that ignore a proxy are named: %v\n%s", warned, r.stderr)
			}
			if r := run("kubevpn-no-such-program"); r.code != int(api.ExitUsage) {
				t.Errorf("%v\nwant exit %d", r, api.ExitUsage)
			}
			root.sameAs(t, before)
			for _, role := range []string{theDaemon, theHelper} {
				if found := l.processes(t, role); len(found) > 0 {
					t.Errorf("a %s runs: %v", role, found)
				}
			}
		})
	}
}
