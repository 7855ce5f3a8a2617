//go:build e2e && linux

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// upFile has a program with a healthcheck, and a Service that needs it.
const upFile = `
env_file: .env
defaults: {namespace: up-shop}
before: touch before
after: [touch, after]
dev:
  shop:
    workload: deployment/shop
    headers: {HEADER: "${ME}"}
    port: [8080:8080]
    command: |  # until somebody ends it, or a file is there
      APP -name laptop -host 127.0.0.1 -http 8080 & trap "kill $$!" TERM
      until test -e die || ! kill -0 $$!; do sleep 0.05; done; kill -9 $$!; exit 3
    healthcheck: {test: curl -fsS -o hit http://127.0.0.1:8080/, start_period: 20s}
expose:
  hook: {port: PORT:8080, needs: {shop: {condition: service_healthy}}, profiles: [hook]}
`

// upSuite starts what a file lists, changes it, and ends it in all ways.
func upSuite(t *testing.T, w *world) {
	s := w.newShop(t, "up-shop", "privileged")
	l := w.newUser(t, lab.Admin)
	v := w.visitor(t)
	dir := filepath.Join(l.home, "project")
	write := func(name, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	up := func(args string) result { return l.sh(t, "cd %s && exec %s up %s", dir, l.program, args) }
	project := func(port string) {
		write("kubevpn.yaml", strings.NewReplacer("HEADER", mine, "APP", filepath.Join(bin, "app"), "PORT", port).Replace(upFile))
	}
	reached := func() error {
		return s.everyPod(t, func(ip string) error {
			return errors.Join(v.want("http://"+ip+":8080/", "laptop", mine, me), v.of("http://"+ip+":8080/", "shop-"))
		})
	}
	objects, before := w.objectsOf(t, "up-shop"), l.snapshot(t)
	// gone checks that nothing of the project is left, here and in the cluster.
	gone := func(t *testing.T) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error { return same(w.objectsOf(t, "up-shop"), objects) })
		if out := l.must(t, "kubevpn", "status"); out != "not connected" {
			t.Error(out)
		}
		if _, err := os.Stat(filepath.Join(dir, "after")); err != nil {
			t.Error(err)
		}
		os.Remove(filepath.Join(dir, "after"))
		l.sameAs(t, before)
	}
	write(".env", "ME="+me+"\n")

	t.Run("first_file_is_one_that_starts", func(t *testing.T) {
		if r := l.sh(t, "cd %s && %s init deployment/shop -n up-shop", dir, l.program); r.code != 0 {
			t.Fatal(r)
		}
		r := l.sh(t, "cd %s && USER=me %s up --dry-run", dir, l.program)
		if r.code != 0 || !strings.Contains(r.stdout, "start: kubevpn proxy --namespace=up-shop --headers=x-user=me deployment/shop") {
			t.Error(r)
		}
		if r := l.sh(t, "cd %s && %s init deployment/shop", dir, l.program); r.code != int(api.ExitUsage) {
			t.Errorf("init replaces a file: %v", r)
		}
	})
	t.Run("problems_are_named_before_anything_starts", func(t *testing.T) {
		write("kubevpn.yaml", "prox: {}\ndev:\n  a: {workload: shop, command: ls, heders: x}\n")
		r := up("-d")
		for _, want := range []string{`kubevpn.yaml:1:1: unknown key "prox"`, `kubevpn.yaml:3:3: a: "shop" is not TYPE/NAME`, `kubevpn.yaml:3:36: unknown key of dev "heders": did you mean headers?`} {
			if r.code != int(api.ExitUsage) || !strings.Contains(r.stderr, want) {
				t.Errorf("no %s: %v", want, r)
			}
		}
	})
	t.Run("edit_changes_only_what_differs", func(t *testing.T) {
		project("80")
		if r := up("-d --profile hook"); r.code != 0 || !strings.Contains(r.stdout, "shop    | ✓ healthy\n") {
			t.Fatal(r)
		}
		if err := reached(); err != nil {
			t.Error(err)
		}
		first := l.projectStates(t)
		if r := up("-d --profile hook"); r.code != 0 {
			t.Fatal(r)
		}
		if d := cmp.Diff(first, l.projectStates(t)); d != "" {
			t.Errorf("the second run changes something:\n%s", d)
		}
		project("81")
		if r := up("--dry-run --profile hook -o json"); r.code != 0 || strings.Count(r.stdout, "keep: ") != 2 || !strings.Contains(r.stdout, `"entry":"hook","detail":"restart: `) {
			t.Error(r)
		}
		if r := up("-d --profile hook"); r.code != 0 {
			t.Fatal(r)
		}
		after := l.projectStates(t)
		if after["hook"].Since.Equal(first["hook"].Since) || !after["shop"].Since.Equal(first["shop"].Since) {
			t.Errorf("before %+v, after %+v", first, after)
		}
		if out := w.kubectl(t, "-n", "up-shop", "get", "service", "hook", "-o", "jsonpath={.spec.ports[*].port}"); out != "81" {
			t.Errorf("the Service has the port %s", out)
		}
		if r := l.sh(t, "cd %s && %s down", dir, l.program); r.code != 0 {
			t.Error(r)
		}
		gone(t)
	})
	t.Run("command_runs_when_all_is_ready", func(t *testing.T) {
		r := up("--wait -- sh -c 'curl -sS --max-time 5 -H " + mine + ":" + me + " http://shop.up-shop/; exit 7'")
		if r.code != 7 || !strings.Contains(r.stdout, "laptop") {
			t.Error(r)
		}
		if r := up("--wait -- sh -c 'touch die; exec sleep 1000'"); r.code != int(api.ExitWorkload) || !strings.Contains(r.stderr, "shop: exit code 3") {
			t.Errorf("a program that died is not reported: %v", r)
		}
		os.Remove(filepath.Join(dir, "die"))
		if reports, err := filepath.Glob(filepath.Join(dir, "kubevpn-report-*.tar.gz")); err != nil || len(reports) != 2 {
			t.Errorf("reports: %v %v", reports, err)
		}
		gone(t)
	})
	for name, signal := range map[string]syscall.Signal{"ctrl_c_ends_it": syscall.SIGINT, "sigterm_ends_it_with_its_command": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			args, ready := []string{"kubevpn", "up", "-f", filepath.Join(dir, "kubevpn.yaml")}, "Everything is up."
			if signal == syscall.SIGTERM {
				args, ready = append(args, "--", "sh", "-c", "echo begun >&2; exec sleep 1000"), "begun"
			}
			cmd := l.command(t.Context(), t, args...)
			said := &testenv.Buffer{}
			cmd.Stdout, cmd.Stderr = &bytes.Buffer{}, said
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, time.Minute, func() error {
				if !strings.Contains(said.String(), ready) {
					return fmt.Errorf("not ready: %s", said)
				}
				return nil
			})
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			err := cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code == 0 != (signal == syscall.SIGINT) {
				t.Errorf("exit code %d: %v\n%s", code, err, said)
			}
			gone(t)
		})
	}
	t.Run("programs_end_with_a_daemon_that_is_killed", func(t *testing.T) {
		if r := up("-d"); r.code != 0 {
			t.Fatal(r)
		}
		if err := syscall.Kill(l.daemonPID(t), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 20*time.Second, func() error {
			if c, err := dialIn(l.network(), "127.0.0.1:8080"); err == nil {
				c.Close()
				return errors.New("the program still listens")
			}
			return nil
		})
		l.soonAs(t, before)
		os.Remove(filepath.Join(dir, "after"))
	})
}

// projectStates returns the states of the only project that is up.
func (l *laptop) projectStates(t *testing.T) map[string]api.ProjectEntry {
	t.Helper()
	var status api.Status
	if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "status", "-o", "json")), &status); err != nil || len(status.Projects) != 1 {
		t.Fatalf("%v %+v", err, status)
	}
	all := map[string]api.ProjectEntry{}
	for _, e := range status.Projects[0].Entries {
		all[e.Name] = e
	}
	return all
}
