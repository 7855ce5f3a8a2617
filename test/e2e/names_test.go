//go:build e2e && linux

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// namesSuite checks that every program resolves cluster names, and that other names go to the previous nameserver.
func namesSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	before, err := w.Queries()
	if err != nil {
		t.Fatal(err)
	}
	pods := w.pods(t, "default", "app=web")
	vip := w.clusterIP(t, "default", "web")
	w.apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: out, namespace: default}
spec: {type: ExternalName, externalName: www.outside.test}
---
apiVersion: v1
kind: Service
metadata: {name: many, namespace: default}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: many-1, namespace: default, labels: {kubernetes.io/service-name: many}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [%s]
`, manyEndpoints(90)))

	dig := func(args ...string) string {
		return l.must(t, append([]string{"dig", "+short", "+time=15", "+tries=1"}, args...)...)
	}
	for _, tt := range []struct{ name, query, want string }{
		{"full", "web.default.svc.cluster.local", vip},
		{"case", "WEB.Default.svc.Cluster.LOCAL", vip},
		{"service_namespace", "web.default", "web.default.svc.cluster.local.\n" + vip},
		{"service", "web", "web.default.svc.cluster.local.\n" + vip},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := dig(tt.query, "A"); got != tt.want {
				t.Errorf("dig %s gave %q, want %q", tt.query, got, tt.want)
			}
		})
	}
	t.Run("getaddrinfo", func(t *testing.T) {
		for _, name := range []string{"web", "web.default", "web.default.svc.cluster.local"} {
			if out := l.must(t, "getent", "ahostsv4", name); !strings.HasPrefix(out, vip) {
				t.Errorf("getent %s: %s", name, out)
			}
		}
	})
	t.Run("headless", func(t *testing.T) {
		out := dig("web-headless.default.svc.cluster.local", "A")
		for _, p := range pods {
			if !strings.Contains(out+"\n", p.String()+"\n") {
				t.Errorf("%s is not in %q", p, out)
			}
		}
	})
	t.Run("srv", func(t *testing.T) {
		for _, name := range []string{"_http._tcp.web.default.svc.cluster.local", "_http._tcp.web.default"} {
			if out := dig(name, "SRV"); !strings.Contains(out, " 80 web.default.svc.cluster.local.") {
				t.Errorf("%s: %q", name, out)
			}
		}
	})
	t.Run("ptr", func(t *testing.T) {
		if out := dig("-x", vip); out != "web.default.svc.cluster.local." {
			t.Errorf("%q", out)
		}
	})
	t.Run("aaaa_without_ipv6_is_no_data", func(t *testing.T) {
		if w.Config().IPv6 {
			return
		}
		out := l.must(t, "dig", "+time=15", "+tries=1", "web.default.svc.cluster.local", "AAAA")
		if !strings.Contains(out, "status: NOERROR") || !strings.Contains(out, "ANSWER: 0") {
			t.Error(out)
		}
	})
	t.Run("unknown_cluster_name_is_NXDOMAIN", func(t *testing.T) {
		if out := l.must(t, "dig", "+time=15", "+tries=1", "nosuch.default.svc.cluster.local"); !strings.Contains(out, "status: NXDOMAIN") {
			t.Error(out)
		}
	})
	t.Run("a_large_answer_comes_over_tcp", func(t *testing.T) {
		name := "many.default.svc.cluster.local"
		testenv.Eventually(t, time.Minute, func() error {
			if out := dig(name); strings.Count(out, "\n") != 89 {
				return fmt.Errorf("%d lines", strings.Count(out, "\n")+1)
			}
			return nil
		})
		if out := l.must(t, "dig", "+time=15", "+tries=1", "+ignore", "+noedns", name); !strings.Contains(out, " tc ") {
			t.Errorf("a UDP answer of 90 addresses is not marked truncated:\n%s", out)
		}
	})
	t.Run("external_name", func(t *testing.T) {
		router := dig("www.outside.test")
		testenv.Eventually(t, time.Minute, func() error {
			if out := dig("out.default"); !strings.HasSuffix(out, "www.outside.test.\n"+router) {
				return fmt.Errorf("%q", out)
			}
			return nil
		})
		if out := l.must(t, "curl", "-sS", "--max-time", "5", "-H", "Host: www.outside.test", "http://out.default/"); out == "" {
			t.Error("an empty page")
		}
	})
	t.Run("same_answers_as_cluster_dns", func(t *testing.T) { sameAsClusterDNS(t, l) })
	t.Run("each_nameserver_gets_only_its_names", func(t *testing.T) {
		l.run(t, "getent", "hosts", "secret-outside.outside.test")
		l.run(t, "getent", "hosts", "secret-cluster.default.svc.cluster.local")
		all, err := w.Queries()
		if err != nil {
			t.Fatal(err)
		}
		asked := all[len(before):] // laptops without a connection rightly asked for cluster names before
		if !slices.ContainsFunc(asked, func(q lab.Query) bool { return q.Name == "secret-outside.outside.test." }) {
			t.Errorf("a query for an outside name did not reach the outside nameserver: %+v", asked)
		}
		if left := ofTheCluster(asked); len(left) > 0 {
			t.Errorf("queries for cluster names left the cluster: %+v", left)
		}
	})
}

// ofTheCluster returns the queries for cluster names.
func ofTheCluster(queries []lab.Query) []lab.Query {
	return slices.DeleteFunc(slices.Clone(queries), func(q lab.Query) bool {
		return !strings.Contains(q.Name, "cluster") && !strings.HasPrefix(q.Name, "web.")
	})
}

func manyEndpoints(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "{addresses: [10.244.200.%d]}, ", i+1)
	}
	return strings.TrimSuffix(b.String(), ", ")
}

// sameAsClusterDNS compares what kubevpn answers, first and again, with what a CoreDNS pod answers.
func sameAsClusterDNS(t *testing.T, l *laptop) {
	const domain = ".default.svc.cluster.local"
	server := "@" + l.pods(t, "kube-system", "k8s-app=kube-dns")[0].String()
	pod := l.pods(t, "default", "app=web")[0].String()
	dashed := strings.ReplaceAll(pod, ".", "-")
	reverse, err := dns.ReverseAddr(pod)
	if err != nil {
		t.Fatal(err)
	}
	reverseVIP, err := dns.ReverseAddr(l.clusterIP(t, "default", "web"))
	if err != nil {
		t.Fatal(err)
	}
	var full, short []string // queries; what the search path makes the same of a short one
	for name, shorter := range map[string]string{
		"web" + domain:                        "web",
		"web-headless" + domain:               "web-headless.default",
		dashed + ".web-headless" + domain:     dashed + ".web-headless.default.svc",
		"_http._tcp.web" + domain:             "_http._tcp.web.default",
		"many" + domain:                       "many.default.svc",
		dashed + ".default.pod.cluster.local": dashed + ".default.pod",
		"nosuch" + domain:                     "",
		"web.nosuch.svc.cluster.local":        "",
		"svc.cluster.local":                   "",
		"cluster.local":                       "",
		"WEB.Default.svc.Cluster.LOCAL":       "",
		reverse:                               "",
		reverseVIP:                            "",
	} {
		for _, qtype := range []string{"A", "AAAA", "SRV", "TXT", "PTR", "NS", "MX", "HTTPS", "CNAME"} {
			full = append(full, name+" "+qtype)
			if shorter == "" || qtype == "CNAME" { // the alias is the answer
				shorter = name
			}
			short = append(short, shorter+" "+qtype)
		}
	}
	want := l.digAll(t, full, server)
	for asked, got := range map[string][]string{"": l.digAll(t, full), " again": l.digAll(t, full), " by its short name": l.digAll(t, short)} {
		for n, query := range full {
			name, _, _ := strings.Cut(query, " ")
			shorter, _, _ := strings.Cut(short[n], " ")
			alias := fmt.Sprintf("\n%s. in cname %s.", shorter, name)
			if answer := strings.Replace(got[n], alias, "", 1); answer != want[n] {
				t.Errorf("%s%s: cluster DNS answers %s, kubevpn %s", query, asked, want[n], answer)
			}
		}
	}
}

// digAll returns the answers to queries (NAME TYPE): the status and the sorted records, in lower case, without their
// TTLs.
func (l *laptop) digAll(t *testing.T, queries []string, flags ...string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "queries")
	if err := os.WriteFile(file, []byte(strings.Join(queries, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	out := l.must(t, append([]string{"dig", "+noall", "+comments", "+answer", "+time=4", "+tries=2", "-f", file}, flags...)...)
	var answers []string
	for _, text := range strings.Split(out, "status: ")[1:] {
		status, rest, _ := strings.Cut(text, ",")
		var records []string
		for line := range strings.Lines(rest) {
			if fields := strings.Fields(line); len(fields) > 4 && !strings.HasPrefix(line, ";") {
				records = append(records, "\n"+strings.ToLower(strings.Join(slices.Delete(fields, 1, 2), " ")))
			}
		}
		slices.Sort(records)
		answers = append(answers, status+strings.Join(records, ""))
	}
	if len(answers) != len(queries) {
		t.Fatalf("%d answers to %d queries: %s", len(answers), len(queries), out)
	}
	return answers
}
