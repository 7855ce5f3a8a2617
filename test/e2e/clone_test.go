//go:build e2e && linux

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// newClonedShop creates a shop and connects a laptop. It returns when a visitor reaches the Service of the shop.
func (w *world) newClonedShop(t *testing.T, namespace string) (s *shop, l *laptop, v *visitor, service string) {
	t.Helper()
	s = w.newShop(t, namespace, "privileged")
	l = w.newLaptop(t, lab.Admin)
	l.connect(t)
	v = w.visitor(t)
	service = "http://" + w.clusterIP(t, s.namespace, "shop") + "/"
	testenv.Eventually(t, time.Minute, func() error { return v.want(service, "a pod") }) // kube-proxy knows the Service
	return s, l, v, service
}

// cloneSuite checks that a clone receives the requests of its owner, no others, and leaves nothing behind.
func cloneSuite(t *testing.T, w *world) {
	s, l, v, service := w.newClonedShop(t, "cloned")
	t.Run("matching_requests_reach_the_clone", func(t *testing.T) { cloneHeaders(t, l, s, v, service) })
	t.Run("all_requests_reach_the_clone", func(t *testing.T) { cloneEverything(t, l, s, v, service) })
	t.Run("no_traffic_reaches_the_clone_by_flag", func(t *testing.T) { cloneOnly(t, l, s, v, service) })
	t.Run("saved_files_reach_the_clone", func(t *testing.T) { cloneSync(t, l, s, v, service) })
	t.Run("go_program_is_rebuilt", func(t *testing.T) { cloneGo(t, l, s, v, service) })
	t.Run("python_program_is_edited", func(t *testing.T) { clonePython(t, l, s, v) })
	t.Run("unwritable_directory_is_reported", func(t *testing.T) { cloneUnwritable(t, l, s) })
	t.Run("start_failure_is_reported", func(t *testing.T) { cloneDoesNotStart(t, l, s) })
	t.Run("kinds", func(t *testing.T) { cloneKinds(t, l, v) })
	t.Run("recovers_or_leaves_nothing_after_failures", func(t *testing.T) { cloneDeaths(t, l, s, v, service) })
	t.Run("lease_ends_after_laptop_is_killed", func(t *testing.T) { cloneOrphan(t, l, s, v, service) })
}

// clone runs `kubevpn clone` and fails the test if the command fails.
func (l *laptop) clone(t *testing.T, s *shop, args ...string) result {
	t.Helper()
	r := l.run(t, append([]string{"kubevpn", "clone", s.workload, "-n", s.namespace}, args...)...)
	if r.code != 0 {
		t.Fatal(r)
	}
	return r
}

// of checks that a pod whose name has this prefix answers.
func (v *visitor) of(url, prefix string, header ...string) error {
	a, err := v.ask(http.MethodGet, url, nil, header...)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(a.Name, prefix) {
		return fmt.Errorf("%s answers, want one of %s", a.Name, prefix)
	}
	return nil
}

// noClone waits until nothing of the clone is left.
func (s *shop) noClone(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error { // a Job whose lease has expired stays for 30 s
		if left := s.kubectl(t, "-n", s.namespace, "get", "jobs,pods,services", "-l", "kubevpn.dev/clone", "-o", "name"); left != "" {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
}

func cloneHeaders(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	before := s.template(t)
	l.clone(t, s, "--headers", mine+"="+me, "--name", "mine", "--env", "GREETING=$(HOME) $x")
	recorded := l.follow(t, s, 2)
	for range 6 {
		if err := v.of(service, "mine-", mine, me); err != nil {
			t.Error(err)
		}
		if err := v.want(service, "a pod"); err != nil {
			t.Error(err)
		}
	}
	if err := s.everyPod(t, func(ip string) error { return v.of("http://"+ip+":8080/", "mine-", mine, me) }); err != nil {
		t.Error(err)
	}
	recorded.wait("a request that went to the clone", func(e *api.Exchange) bool { return e.To == api.ToClone && e.Response.Status == 200 })
	recorded.stop()
	for ip := range strings.FieldsSeq(s.kubectl(t, "-n", s.namespace, "get", "endpointslices", "-l", "kubernetes.io/service-name=shop", "-o", "jsonpath={.items[*].endpoints[*].targetRef.name}")) {
		if strings.HasPrefix(ip, "mine-") {
			t.Errorf("the Service has the clone's pod %s as an endpoint", ip)
		}
	}
	if got := s.kubectl(t, "-n", s.namespace, "get", "job", "mine", "-o", `jsonpath={.spec.template.spec.containers[0].env}`); !strings.Contains(got, "$$(HOME) $$x") {
		t.Errorf("the clone's environment: %s", got)
	}
	i := l.intercept(t)
	if i.Clone == nil || i.Clone.Name != "mine" || i.Clone.State != api.CloneRunning || i.State != api.InterceptActive {
		t.Errorf("status: %+v, clone %+v", i, i.Clone)
	}
	l.leave(t, s)
	s.recorded(t, i.Owner, "CloneBegan", "CloneEnded", "InterceptBegan", "InterceptEnded")
	if err := v.want(service, "a pod", mine, me); err != nil {
		t.Errorf("after leave: %v", err)
	}
	s.noClone(t)
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}

// cloneEverything checks that, without a match, requests go to the pods of the clone in turn.
func cloneEverything(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	l.clone(t, s, "--name", "all", "--replicas", "2")
	testenv.Eventually(t, time.Minute, func() error {
		if i := l.intercept(t); len(i.Clone.Pods) != 2 || !i.Clone.Pods[0].Ready || !i.Clone.Pods[1].Ready {
			return fmt.Errorf("%+v", i.Clone)
		}
		return nil
	})
	seen := map[string]bool{}
	testenv.Eventually(t, time.Minute, func() error {
		a, err := v.ask(http.MethodGet, service, nil)
		if err != nil {
			return err
		}
		if !strings.HasPrefix(a.Name, "all-") {
			return fmt.Errorf("%s answers", a.Name)
		}
		seen[a.Name] = true // after the check: the Service loses requests while a pod of the workload stops
		if len(seen) < 2 {
			return fmt.Errorf("only %s answered", a.Name)
		}
		return nil
	})
	// Requests succeed while a pod of the clone stops.
	for name := range seen {
		s.kubectl(t, "-n", s.namespace, "delete", "pod", name, "--wait=false")
		break
	}
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		if _, err := v.ask(http.MethodGet, service, nil); err != nil {
			t.Errorf("while a pod of the clone stops: %v", err)
		}
	}
	l.leave(t, s)
	s.noClone(t)
}

// cloneOnly checks that --no-traffic sends no request to the clone.
func cloneOnly(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	l.clone(t, s, "--name", "quiet", "--no-traffic")
	ip := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "kubevpn.dev/clone=quiet", "-o", "jsonpath={.items[0].status.podIP}")
	if err := v.of("http://"+ip+":8080/", "quiet-"); err != nil {
		t.Error(err)
	}
	for range 4 {
		if err := v.want(service, "a pod"); err != nil {
			t.Error(err)
		}
	}
	// Its own name reaches the clone through the tunnel and from other pods.
	testenv.Eventually(t, time.Minute, func() error {
		r := l.run(t, "curl", "-sS", "--max-time", "5", "http://quiet."+s.namespace+"/")
		if r.code != 0 || !strings.Contains(r.stdout, `"name":"quiet-`) {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	own := s.clusterIP(t, s.namespace, "quiet")
	for _, port := range []string{"80", "8080"} {
		// kube-proxy learns of it from the API server, perhaps later than other pods.
		testenv.Eventually(t, time.Minute, func() error { return v.of("http://"+own+":"+port+"/", "quiet-") })
	}
	if i := l.intercept(t); i.Clone.Host != "quiet."+s.namespace || len(i.Clone.Ports) == 0 || !i.Clone.NoTraffic {
		t.Errorf("status: %+v", i.Clone)
	}
	r := l.run(t, "kubevpn", "leave", s.workload, "-n", s.namespace)
	if r.code != 0 {
		t.Error(r)
	}
	s.noClone(t)
}

// content returns a file of the program that answers, and when that program started.
func (v *visitor) content(service, path string) (text, began string, err error) {
	req, err := http.NewRequest(http.MethodGet, service+"file?path="+url.QueryEscape(path), nil)
	if err != nil {
		return "", "", err
	}
	req.Header.Set(mine, me)
	resp, err := v.http.Do(req)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, b)
	}
	return string(b), resp.Header.Get("X-Began"), err
}

// cloneSync checks that files saved on the laptop appear in the container.
func cloneSync(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("page", "one")
	write("old", "to be renamed")
	l.clone(t, s, "--headers", mine+"="+me, "--name", "synced", "--sync", dir+":/scratch/site", "--command", "/app")
	has := func(name, want string) time.Duration {
		t.Helper()
		began := time.Now()
		testenv.Eventually(t, time.Minute, func() error {
			text, _, err := v.content(service, "/scratch/site/"+name)
			if err != nil {
				return err
			}
			if text != want {
				return fmt.Errorf("%s is %q, want %q", name, text, want)
			}
			return nil
		})
		return time.Since(began)
	}
	has("page", "one")
	var took time.Duration
	for n := range 5 {
		text := fmt.Sprint("edited ", n)
		write("page", text)
		took = max(took, has("page", text))
	}
	t.Logf("the slowest of five saves was served after %v", took)
	if err := os.Rename(filepath.Join(dir, "old"), filepath.Join(dir, "new")); err != nil {
		t.Fatal(err)
	}
	has("new", "to be renamed")
	testenv.Eventually(t, time.Minute, func() error {
		if _, _, err := v.content(service, "/scratch/site/old"); err == nil {
			return fmt.Errorf("the renamed file still exists under its old name")
		}
		return nil
	})
	if i := l.intercept(t); len(i.Clone.Sync) != 1 || !i.Clone.Sync[0].Synced || i.Clone.Sync[0].LastError != "" {
		t.Errorf("status: %+v", i.Clone)
	}
	t.Run("program_restarts_after_a_save", func(t *testing.T) {
		l.clone(t, s, "--headers", mine+"="+me, "--name", "restarted", "--sync", dir+":/scratch/site", "--restart-on-sync", "--command", "/app")
		has("new", "to be renamed")
		_, first, err := v.content(service, "/scratch/site/page")
		if err != nil {
			t.Fatal(err)
		}
		write("page", "again")
		testenv.Eventually(t, time.Minute, func() error {
			text, began, err := v.content(service, "/scratch/site/page")
			if err != nil {
				return err
			}
			if text != "again" || began == first {
				return fmt.Errorf("%q from the program that started at %s, which was not restarted", text, began)
			}
			return nil
		})
		if n := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "kubevpn.dev/clone=restarted", "-o", "jsonpath={.items[0].status.containerStatuses[0].restartCount}"); n != "0" {
			t.Errorf("the container was started %s times", n)
		}
	})
	l.leave(t, s)
	s.noClone(t)
}

// cloneOrphan checks what happens when no laptop is left to delete the clone: the application receives all requests,
// and Kubernetes deletes the clone when its lease expires.
func cloneOrphan(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	l.clone(t, s, "--headers", mine+"="+me, "--name", "orphan")
	if err := v.of(service, "orphan-", mine, me); err != nil {
		t.Error(err)
	}
	kill(t, l.processes(t, theDaemon)[0].pid)
	began := time.Now()
	testenv.Eventually(t, time.Minute, func() error { return v.want(service, "a pod", mine, me) })
	t.Logf("the application answered after %v; the promise is 5 s", time.Since(began))
	// The test shortens the rest of the lease instead of waiting two minutes.
	deadline := s.kubectl(t, "-n", s.namespace, "get", "job", "orphan", "-o", "jsonpath={.spec.activeDeadlineSeconds}")
	if deadline != "120" {
		t.Errorf("the lease lasts %s seconds", deadline)
	}
	s.kubectl(t, "-n", s.namespace, "patch", "job", "orphan", "--type=merge", "-p", `{"spec":{"activeDeadlineSeconds":1}}`)
	s.noClone(t)
	l.connect(t)
}
