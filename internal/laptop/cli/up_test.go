package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/project"
)

// TestProjectsAreCheckedByTheCommands: what the flags of a command reject is a problem of the file, at its place.
func TestProjectsAreCheckedByTheCommands(t *testing.T) {
	file := filepath.Join(t.TempDir(), project.DefaultFile)
	if err := os.WriteFile(file, []byte(`
connect: {main: {netstak: gvisor, foreground: true}}
proxy:
  web: {workload: deployment/web, hedaers: [a=b], output: json}
  api: {workload: web}
  cart: {workload: deployment/cart, record: 3, headers: ["x=~("]}
  port: {workload: deployment/port, port: {http: 3000}}
dev:
  shop: {workload: deployment/shop}
clone:
  c: {workload: deployment/c, command: [a, b], restart-on-sync: true}
  d: {workload: deployment/d, command: ls, target-image: x, env: {A: b}, no-traffic: true}
expose:
  hook: {port: 80:x}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := project.Read(project.Options{File: file, Commands: projectCommands{&command.Factory{}}, Similar: similar})
	if err == nil {
		t.Fatal("no problems")
	}
	want := []string{
		`2:18: unknown key of connect "netstak": did you mean netstack?`,
		`2:35: unknown key of connect "foreground"`,
		`4:35: unknown key of proxy "hedaers": did you mean headers?`,
		`4:51: unknown key of proxy "output"`,
		`5:3: api: "web" is not TYPE/NAME`,
		`6:3: cart: header "x": error parsing regexp: missing closing ): ` + "`(`",
		`7:37: port: --port: "http=3000": "3000" is not HOST:PORT`,
		"9:3: shop: `kubevpn dev` requires a command",
		"11:48: c: --restart-on-sync requires --sync",
		`14:3: hook: "80:x": "x" is not a local port`,
	}
	got := strings.Split(err.Error(), "\n")
	for i := range got {
		got[i] = strings.TrimPrefix(got[i], "kubevpn.yaml:")
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}
