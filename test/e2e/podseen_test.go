//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// seenBy is what `app look` prints: what a program sees, by kind.
type seenBy map[string]any

// differing are the kinds in which a program differs from its container, with the row of the table "Differences from a
// pod" in docs/dev.md that says so.
var differing = map[string]string{
	"user": "file owner", "working directory": "working directory",
}

// podSame checks that a program sees what the container in the pod sees, except what docs/dev.md names.
func podSame(t *testing.T, p *podded, pair *shop) {
	at, err := json.Marshal(map[string]any{
		"Dirs":  []string{"/pair", "/down", "/held", "/var/run/secrets/kubernetes.io/serviceaccount"},
		"Names": []string{"kubernetes.default", "store", "web", "alias.test", "nowhere.default.svc.cluster.local", "localhost"},
		"Dial": []string{"127.0.0.1:5432", "[::1]:5432", "127.0.0.1:4444", p.echo + ":9001", p.echo + ":4444", "web:80",
			p.store.String() + ":5432"},
		"Echo": "http://" + p.echo + ":8080/",
	})
	if err != nil {
		t.Fatal(err)
	}
	parse := func(text string) (seen seenBy) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), &seen); err != nil {
			t.Fatalf("%v in %q", err, text)
		}
		return seen
	}
	if r := p.eve.dev(t, pair, "-c", "app", "--isolate", "--volume", "held=remote:rw", "--", "sh", "-c", "mkdir /held/d; echo held >/held/d/file"); r.code != 0 {
		t.Fatal(r)
	}
	inside := parse(p.kubectl(t, "-n", p.namespace, "exec", pair.workload, "-c", "app", "--", "/app", "look", string(at)))
	r := p.eve.dev(t, pair, "-c", "app", "--via-pod", "--volume", "held=remote", "--", filepath.Join(bin, "app"), "look", string(at))
	if r.code != 0 {
		t.Fatal(r)
	}
	here := parse(r.stdout)
	sameEnvironment(t, inside, here)
	for _, kind := range slices.Sorted(maps.Keys(inside)) {
		d := cmp.Diff(inside[kind], here[kind])
		if _, differs := differing[kind]; differs != (d != "") {
			t.Errorf("%s differs: %v, want %v (-container +program)\n%s", kind, d != "", differs, d)
		}
	}
	text, err := os.ReadFile("../../docs/dev.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "### Differences from a pod")
	table, _, _ = strings.Cut(table, "\n## ")
	for kind, row := range differing {
		if !strings.Contains(table, "| "+row) {
			t.Errorf("docs/dev.md has no row %q, for %s", row, kind)
		}
	}
}

// sameEnvironment checks that the program has the variables of the container, and removes them: it has those of this
// machine, too.
func sameEnvironment(t *testing.T, inside, here seenBy) {
	t.Helper()
	of, has := inside["environment"].(map[string]any), here["environment"].(map[string]any)
	for name, value := range of {
		if !slices.Contains([]string{"PATH", "HOME"}, name) && has[name] != value {
			t.Errorf("%s is %q in the container, and %q for the program", name, value, has[name])
		}
	}
	if of["GREETING"] == nil || of["CERT"] == nil || of["KUBERNETES_SERVICE_HOST"] == nil {
		t.Errorf("the container has %v", of)
	}
	delete(inside, "environment")
	delete(here, "environment")
}
