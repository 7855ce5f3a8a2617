//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"kubevpn/test/lab"
)

// echoed is the HTTP answer of the echo server.
type echoed struct {
	Host, Remote, Path string
	Header             map[string][]string
}

// get fetches a page with curl and decodes the answer of the echo server.
func (l *laptop) get(t *testing.T, url string) (echoed, error) {
	t.Helper()
	r := l.run(t, "curl", "-sS", "--max-time", "8", url)
	if r.code != 0 {
		return echoed{}, fmt.Errorf("%v", r)
	}
	var e echoed
	if err := json.Unmarshal([]byte(r.stdout), &e); err != nil {
		return e, fmt.Errorf("%s: %w: %q", url, err, r.stdout)
	}
	return e, nil
}

// reachSuite checks that any program reaches pods, ClusterIPs and names by TCP, UDP and ping, and the outside as
// before.
func reachSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	pods := w.pods(t, "default", "app=web")
	vip := w.clusterIP(t, "default", "web")

	t.Run("nothing_is_reachable_before_connect", func(t *testing.T) {
		for _, host := range []string{vip, pods[0].String()} {
			if r := l.run(t, "curl", "-sS", "--max-time", "2", "http://"+host+":8080/"); r.code == 0 {
				t.Errorf("reachable without kubevpn: %v", r)
			}
		}
	})
	l.connect(t)

	for _, url := range []string{
		"http://web/", "http://web.default/", "http://web.default.svc/", "http://web.default.svc.cluster.local/",
		"http://web-headless:8080/", "http://" + vip + "/",
		"http://" + pods[0].String() + ":8080/", "http://" + pods[1].String() + ":8080/",
	} {
		t.Run("http_"+strings.NewReplacer("/", "", ":", "_").Replace(strings.TrimPrefix(url, "http://")), func(t *testing.T) {
			e, err := l.get(t, url)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(e.Host, "web-") {
				t.Errorf("answered by %q", e.Host)
			}
		})
	}
	t.Run("service_reaches_every_pod", func(t *testing.T) {
		if w.isSystem() { // kube-proxy chooses at random
			if hosts := l.hosts(t, "http://web/", 30); len(hosts) != 2 {
				t.Errorf("30 requests to two pods went to %v", hosts)
			}
			return
		}
		hosts := l.hosts(t, "http://"+vip+"/", 10) // of a name, curl may try both families (RFC 8305)
		if len(hosts) != 2 || hosts[keys(hosts)[0]] != 5 {
			t.Errorf("round robin over two pods gave %v", hosts)
		}
	})
	t.Run("udp", func(t *testing.T) {
		for _, target := range []string{vip, pods[0].String(), pods[1].String()} {
			t.Run(target, func(t *testing.T) {
				t.Parallel() // nc ends after two seconds of silence
				if r := l.sh(t, "printf hello | nc -u -w 2 %s 9001", target); r.stdout != "hello" {
					t.Errorf("%v", r)
				}
			})
		}
	})
	t.Run("ping", func(t *testing.T) {
		for _, target := range []string{pods[0].String(), pods[1].String()} {
			l.must(t, "ping", "-n", "-c", "2", "-i", "0.2", "-W", "3", target)
			l.must(t, "ping", "-n", "-c", "1", "-s", "6000", "-W", "3", target)
		}
	})
	t.Run("outside_is_reachable_as_before", func(t *testing.T) {
		if out := l.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/"); out == "" {
			t.Error("an empty page")
		}
	})
	t.Run("bulk_both_ways", func(t *testing.T) {
		// Send 64 MiB through the echo server and compare them.
		r := l.run(t, "sh", "-c", fmt.Sprintf(`
			cd %s && head -c 67108864 /dev/urandom >data
			nc -N %s 9001 <data >back && cmp data back && stat -c %%s back; rm -f data back`, t.TempDir(), vip))
		if strings.TrimSpace(r.stdout) != "67108864" {
			t.Error(r)
		}
	})
	t.Run("nothing_is_reachable_after_disconnect", func(t *testing.T) {
		l.must(t, "kubevpn", "disconnect", "--all")
		start := time.Now()
		if r := l.run(t, "curl", "-sS", "--max-time", "2", "http://"+vip+"/"); r.code == 0 {
			t.Errorf("still reachable: %v", r)
		}
		if r := l.run(t, "curl", "-sS", "--max-time", "5", "http://web.default/"); r.code != 6 {
			t.Errorf("a cluster name resolves without kubevpn after %v: %v", time.Since(start), r)
		}
	})
}

func keys[V any](m map[string]V) (out []string) {
	for k := range m {
		out = append(out, k)
	}
	return out
}
