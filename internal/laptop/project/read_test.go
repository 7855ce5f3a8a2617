package project

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// commands are the flags of the tests.
type commands struct{}

func (commands) New(kind string) (*pflag.FlagSet, func(args []string) error) {
	f := pflag.NewFlagSet(kind, pflag.ContinueOnError)
	f.String("namespace", "", "")
	if kind == KindConnect {
		return f, func([]string) error { return nil }
	}
	headers := f.StringArray("headers", nil, "")
	f.Bool("mirror", false, "")
	if kind == kindDev {
		f.StringArray("env", nil, "")
	}
	return f, func([]string) error {
		if slices.Contains(*headers, "bad") {
			return fmt.Errorf("--headers: it is bad")
		}
		return nil
	}
}

// write writes files, the first of which is kubevpn.yaml, and returns how to read it.
func write(t testing.TB, texts ...string) Options {
	dir := t.TempDir()
	for i, name := range []string{DefaultFile, "kubevpn.local.yaml", ".env"}[:len(texts)] {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(texts[i]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Options{File: filepath.Join(dir, DefaultFile), Environ: []string{"USER=me"}, Commands: commands{},
		Similar: func(string, []string) []string { return nil }}
}

func TestReadReturnsTheCommandsOfTheFile(t *testing.T) {
	o := write(t, `
name: shop
env_file: .env
x-match: &match {headers: ["x-user=${USER}", "price=$$1"]}
defaults: {namespace: "${TEAM:-none}"}
before: make db
proxy:
  web: {<<: *match, workload: [deployment/web, deployment/api], mirror: true}
  other: {workload: deployment/x, profiles: [debug]}
dev:
  cart:
    workload: deployment/cart
    command: [go, run, .]
    directory: cmd
    env: {DB: "${DB}"}
    healthcheck: {test: [CMD-SHELL, curl -f localhost], interval: 2s, start_period: 5s}
    needs: {web: {condition: service_started}}
    after: [make, clean]
expose:
  hook: {port: 80:3000, needs: [cart]}
`, `
name: mine
proxy: {web: {namespace: other}}
`, "DB=pg\nTEAM=shop\nUSER=somebody\n")
	p, err := Read(o)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(o.File)
	want := &Project{
		Name: "mine", File: o.File, Environ: []string{"DB=pg", "TEAM=shop", "USER=somebody", "USER=me"}, Variables: []string{"DB=pg", "TEAM=shop", "USER=somebody"}, Before: []string{"sh", "-c", "make db"},
		Cluster: []string{"--namespace=shop"},
		Entries: []Entry{
			{Kind: "connect", Name: "connect", Directory: dir, Args: []string{"--namespace=shop"}},
			{Kind: "proxy", Name: "web", Directory: dir, Args: []string{"--mirror=true", "--headers=x-user=me", "--headers=price=$1", "--namespace=other", "deployment/web", "deployment/api"}},
			{Kind: "expose", Name: "hook", Directory: dir, Args: []string{"--namespace=shop", "hook", "80:3000"}, Needs: map[string]Need{"cart": Started}},
			{Kind: "dev", Name: "cart", Directory: filepath.Join(dir, "cmd"), Args: []string{"--env=DB=pg", "--namespace=shop", "deployment/cart"}, Program: []string{"go", "run", "."},
				Health: &Healthcheck{Test: []string{"sh", "-c", "curl -f localhost"}, Interval: 2 * time.Second, Timeout: 30 * time.Second, StartPeriod: 5 * time.Second, Retries: 3},
				Needs:  map[string]Need{"web": Started}, After: []string{"make", "clean"}},
		},
	}
	if d := cmp.Diff(want, p); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	o.Profiles = []string{"debug"}
	if p, err = Read(o); err != nil || len(p.Entries) != len(want.Entries)+1 {
		t.Errorf("with the profile: %+v, %v", p, err)
	}
}

func TestReadNamesAllProblemsWithTheirPlaces(t *testing.T) {
	o := write(t, `title: x
defaults: {nosuch: 1}
proxy:
  web:
    workload: deployment/web
    nosuch: 1
    mirror: maybe
    headers: ["a=${UNSET}", "b=${USER"]
  twice: {workload: deployment/web}
  bad: {workload: x/y, headers: bad}
  connect: {workload: x/z}
  list: [a]
dev:
  a: {needs: [b], healthcheck: {retries: 0, interval: soon, tset: x}}
  b: {needs: {a: {condition: soon}, c: {}}, directory: [a]}
clone: [c]
`, "before: ${ALSO}\n")
	want := `kubevpn.yaml:1:1: unknown key "title"
kubevpn.yaml:2:12: unknown default "nosuch"
kubevpn.yaml:6:5: unknown key of proxy "nosuch"
kubevpn.yaml:7:13: mirror: "maybe" is not of the type bool
kubevpn.yaml:8:15: the variable UNSET is not set: set it, or write ${UNSET:-DEFAULT}; $$ is a dollar
kubevpn.yaml:8:29: "${USER" has no }
kubevpn.yaml:9:3: twice intercepts deployment/web, as web does: the last one would replace the other
kubevpn.yaml:10:24: bad: --headers: it is bad
kubevpn.yaml:11:3: the connection has the name connect
kubevpn.yaml:12:9: list is a mapping of keys
kubevpn.yaml:14:3: a and b need each other
kubevpn.yaml:14:32: healthcheck requires test
kubevpn.yaml:14:42: retries: "0" is not a positive number
kubevpn.yaml:14:55: interval: "soon" is not a duration such as 10s
kubevpn.yaml:14:61: unknown key "tset" of healthcheck
kubevpn.yaml:15:3: b and a need each other
kubevpn.yaml:15:3: b needs c, which is no entry
kubevpn.yaml:15:30: condition: "soon" is none of service_started, service_healthy and service_completed_successfully
kubevpn.yaml:15:56: this must be one value
kubevpn.yaml:16:8: clone is a mapping from names to entries
kubevpn.local.yaml:1:9: the variable ALSO is not set: set it, or write ${ALSO:-DEFAULT}; $$ is a dollar`
	_, err := Read(o)
	if err == nil {
		t.Fatal("no problems")
	}
	if d := cmp.Diff(want, err.Error()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestReadRejectsAFileThatGrows(t *testing.T) {
	text := "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
	for i := range 9 {
		text += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 10))
	}
	if _, err := Read(write(t, text)); err == nil || !strings.Contains(err.Error(), "more than 100000 values") {
		t.Error(err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add("proxy: {web: {workload: deployment/web, headers: [\"a=${USER}\"]}}", "")
	f.Add("a: &a {<<: *a}", "before: $$ ${x:-y}")
	f.Add("dev: {a: {needs: {a: {condition: x}}, healthcheck: {test: [CMD]}}}", "dev: [")
	f.Fuzz(func(t *testing.T, text, local string) {
		p, err := Read(write(t, text, local))
		if err != nil {
			return
		}
		for _, e := range p.Entries {
			if !slices.Contains(Kinds[:], e.Kind) || e.Directory == "" {
				t.Errorf("%+v", e)
			}
		}
	})
}
