//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// programOf returns the processes of a pod, on this machine, whose command line starts with argv.
func (w *world) programOf(t *testing.T, namespace, pod string, argv ...string) []int {
	t.Helper()
	uid := w.kubectl(t, "-n", namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join(argv, "\x00") + "\x00"
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline") // empty if the process has ended
		group, _ := os.ReadFile("/proc/" + e.Name() + "/cgroup")
		if strings.HasPrefix(string(line), want) && (strings.Contains(string(group), uid) || strings.Contains(string(group), strings.ReplaceAll(uid, "-", "_"))) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// killProgram kills the one process of the clone's pod that has this command line.
func (s *shop) killProgram(t *testing.T, clone string, argv ...string) {
	t.Helper()
	pids := s.programOf(t, s.namespace, s.clonePod(t, clone), argv...)
	if len(pids) != 1 {
		t.Fatalf("%q has %d processes, want 1", argv, len(pids))
	}
	kill(t, pids[0])
}

// clonePod returns the running pod of the clone, ignoring pods that are being deleted.
func (s *shop) clonePod(t *testing.T, clone string) string {
	t.Helper()
	out := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "kubevpn.dev/clone="+clone, "--field-selector=status.phase=Running", "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.metadata.deletionTimestamp}{"\n"}{end}`)
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 1 {
			return f[0]
		}
	}
	t.Fatalf("no pod of %s runs: %q", clone, out)
	return ""
}

// cloneDeaths checks that requests are answered after each failure, and that the clone either recovers or leaves
// nothing.
func cloneDeaths(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte("a page"), 0o644); err != nil {
		t.Fatal(err)
	}
	l.clone(t, s, "--headers", mine+"="+me, "--name", "mortal", "--sync", dir+":/scratch/site", "--command", "/app")
	back := func(t *testing.T) {
		t.Helper()
		began := time.Now()
		testenv.Eventually(t, 90*time.Second, func() error {
			if err := v.of(service, "mortal-", mine, me); err != nil {
				return err
			}
			text, _, err := v.content(service, "/scratch/site/page")
			if err == nil && text != "a page" {
				err = fmt.Errorf("the page is %q", text)
			}
			return err
		})
		t.Logf("the clone answered after %v", time.Since(began).Round(time.Millisecond))
		if err := v.want(service, "a pod"); err != nil {
			t.Errorf("without the header: %v", err)
		}
	}
	application := func(t *testing.T, within time.Duration) {
		t.Helper()
		began := time.Now()
		testenv.Eventually(t, within+20*time.Second, func() error { return v.want(service, "a pod", mine, me) })
		t.Logf("the application answered after %v; the promise is %v", time.Since(began), within)
	}
	restarts := func(t *testing.T) string {
		t.Helper()
		return s.kubectl(t, "-n", s.namespace, "get", "pod", s.clonePod(t, "mortal"), "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
	}
	back(t)
	t.Run("restarts_after_program_is_killed", func(t *testing.T) {
		before := restarts(t)
		s.killProgram(t, "mortal", "/app")
		back(t)
		if after := restarts(t); after != before {
			t.Errorf("the container was started %s times, and %s before", after, before)
		}
	})
	t.Run("restarts_after_supervisor_is_killed", func(t *testing.T) {
		before := restarts(t)
		s.killProgram(t, "mortal", api.SupervisorProgram, "supervise")
		testenv.Eventually(t, 60*time.Second, func() error {
			if restarts(t) == before {
				return fmt.Errorf("the container was not restarted")
			}
			return nil
		})
		back(t)
	})
	t.Run("recovers_after_agents_are_killed", func(t *testing.T) {
		for name := range s.ready(t) {
			pids := s.agents(t, name)
			if len(pids) == 0 {
				t.Fatalf("pod %s has no agent", name)
			}
			for _, pid := range pids {
				kill(t, pid)
			}
		}
		back(t)
	})
	t.Run("recovers_after_manager_is_killed", func(t *testing.T) {
		c := l.connection(t)
		pids := s.programOf(t, c.ManagerNamespace, c.ManagerPod, "/traffic", "manager")
		if len(pids) != 1 {
			t.Fatalf("the manager has %d processes, want 1", len(pids))
		}
		kill(t, pids[0])
		l.connectedAgain(t, 60*time.Second)
		back(t)
	})
	t.Run("recovers_after_pod_is_deleted", func(t *testing.T) {
		pod := s.clonePod(t, "mortal")
		s.kubectl(t, "-n", s.namespace, "delete", "pod", pod, "--wait=false")
		testenv.Eventually(t, 60*time.Second, func() error {
			a, err := v.ask("GET", service, nil, mine, me)
			// Until the agents know, they return an error; then the application answers.
			if err != nil && !strings.Contains(err.Error(), "502 Bad Gateway: kubevpn: ") {
				t.Errorf("while the pod stops: %v", err)
			}
			if err == nil && (!strings.HasPrefix(a.Name, "mortal-") || a.Name == pod) {
				err = fmt.Errorf("%s answers", a.Name)
			}
			return err
		})
		back(t)
	})
	t.Run("moves_after_node_is_drained", func(t *testing.T) {
		place := func() string {
			return s.kubectl(t, "-n", s.namespace, "get", "pod", s.clonePod(t, "mortal"), "-o", "jsonpath={.spec.nodeName}")
		}
		node := place()
		defer s.kubectl(t, "uncordon", node)
		s.kubectl(t, "drain", node, "--pod-selector=kubevpn.dev/clone=mortal", "--delete-emptydir-data", "--timeout=120s")
		testenv.Eventually(t, 60*time.Second, func() error { return v.of(service, "mortal-", mine, me) })
		back(t)
		if now := place(); now == node {
			t.Errorf("the clone is on %s, which was drained", now)
		}
	})
	t.Run("ends_after_job_is_deleted", func(t *testing.T) {
		s.kubectl(t, "-n", s.namespace, "delete", "job", "mortal")
		testenv.Eventually(t, 40*time.Second, func() error {
			if i := l.intercept(t); i.Error == nil || !strings.HasPrefix(i.Error.Message, "somebody deleted the clone mortal") {
				return fmt.Errorf("status: %+v", i.Error)
			}
			return nil
		})
		application(t, 5*time.Second)
		s.noClone(t)
		l.leave(t, s)
	})

	// The failures below are on the laptop's side.
	begin := func(t *testing.T, name string) {
		t.Helper()
		l.clone(t, s, "--headers", mine+"="+me, "--name", name)
		if err := v.of(service, name+"-", mine, me); err != nil {
			t.Error(err)
		}
	}
	t.Run("ends_after_reset_by_an_admin", func(t *testing.T) {
		begin(t, "unwanted")
		l.must(t, "kubevpn", "reset", s.workload, "-n", s.namespace)
		application(t, 5*time.Second)
		s.noClone(t)
		l.leave(t, s)
	})
	t.Run("ends_after_disconnect", func(t *testing.T) {
		begin(t, "cut")
		l.must(t, "kubevpn", "disconnect", "--all")
		application(t, 5*time.Second)
		s.noClone(t)
		l.must(t, "kubevpn", "connect")
	})
	t.Run("ends_after_helper_is_killed", func(t *testing.T) {
		begin(t, "helpless")
		kill(t, l.process(t, theHelper).pid)
		application(t, 5*time.Second)
		s.noClone(t)
		l.must(t, "kubevpn", "connect")
	})
	t.Run("ends_after_command_is_killed", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		cmd := l.command(ctx, t, "kubevpn", "clone", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--name", "attached", "--foreground")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 60*time.Second, func() error { return v.of(service, "attached-", mine, me) })
		kill(t, l.process(t, "clone").pid)
		if err := cmd.Wait(); err == nil {
			t.Errorf("the killed command exited with 0: %s", out.String())
		}
		application(t, 5*time.Second)
		s.noClone(t)
		if n := len(l.status(t).Intercepts); n != 0 {
			t.Errorf("%d intercepts", n)
		}
	})
	t.Run("leave_deletes_it_after_daemon_is_killed", func(t *testing.T) {
		begin(t, "left")
		kill(t, l.process(t, theDaemon).pid)
		application(t, 5*time.Second)
		r := l.run(t, "kubevpn", "leave", s.workload, "-n", s.namespace)
		if r.code != 0 || !strings.Contains(r.stderr, "Deleting the clone left") {
			t.Error(r)
		}
		s.noClone(t)
		l.must(t, "kubevpn", "connect")
	})
	t.Run("clone_replaces_it_after_daemon_is_killed", func(t *testing.T) {
		begin(t, "heir")
		old := s.clonePod(t, "heir")
		kill(t, l.process(t, theDaemon).pid)
		application(t, 5*time.Second)
		began := time.Now()
		l.clone(t, s, "--headers", mine+"="+me, "--name", "heir")
		if took := time.Since(began); took < 20*time.Second { // the clone could belong to another machine
			t.Errorf("the new clone replaced the old one after only %v", took)
		}
		if err := v.of(service, "heir-", mine, me); err != nil {
			t.Error(err)
		}
		if now := s.clonePod(t, "heir"); now == old {
			t.Errorf("the clone is still %s", now)
		}
		l.leave(t, s)
		s.noClone(t)
	})
}
