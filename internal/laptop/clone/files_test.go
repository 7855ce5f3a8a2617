package clone

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/process/files"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/remotefs"
)

// containers makes each pod receive files in a directory, as `traffic supervise` does.
func containers(t *testing.T, w *world, place func(pod string) string) {
	var serving sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		serving.Wait()
	})
	w.dial = func(pod string, command []string) net.Conn {
		ours, theirs := net.Pipe()
		if want := []string{api.SupervisorProgram, "sync", "0"}; !slices.Equal(command, want) {
			t.Errorf("%q is run, want %q", command, want)
		}
		serving.Go(func() {
			defer theirs.Close()
			hello := files.Hello{Protocol: files.Protocol}
			err := os.MkdirAll(filepath.Dir(place(pod)), 0o755)
			var server *remotefs.Server
			if err == nil {
				server, hello.Name, err = remotefs.Open(place(pod), false)
			}
			if err != nil {
				hello.Error = err.Error()
			}
			if json.NewEncoder(theirs).Encode(hello) == nil && err == nil {
				_ = server.Serve(ctx, theirs) // the source reports errors
			}
		})
		return ours
	}
}

func local(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte("one"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestPodHasFilesBeforeRequests checks that each pod has the files before requests go to it, and that it receives later
// saves.
func TestPodHasFilesBeforeRequests(t *testing.T) {
	w := newWorld()
	from, to := local(t), t.TempDir()
	containers(t, w, func(pod string) string { return filepath.Join(to, pod) })
	r := w.run(t, api.CloneSpec{Replicas: 2, Sync: []api.SyncPair{{Local: from, Remote: "/site"}}, Restart: true})
	r.have(pod("a", corev1.PodRunning))
	<-r.Begun()
	same := func(want string, pods ...string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			for _, pod := range pods {
				got, err := os.ReadFile(filepath.Join(to, pod, "page"))
				if err != nil {
					return err
				}
				if string(got) != want {
					return &os.PathError{Op: string(got), Path: pod, Err: os.ErrInvalid}
				}
			}
			return nil
		})
	}
	if got, err := os.ReadFile(filepath.Join(to, "a", "page")); err != nil || string(got) != "one" {
		t.Errorf("the clone started with %q, %v", got, err)
	}
	r.have(pod("a", corev1.PodRunning), pod("b", corev1.PodRunning))
	same("one", "a", "b")
	if err := os.WriteFile(filepath.Join(from, "page"), []byte("two"), 0o644); err != nil {
		t.Fatal(err)
	}
	same("two", "a", "b")
	testenv.Until(t, "in sync", func() bool {
		s := r.Status().Sync
		return len(s) == 1 && s[0].Synced && s[0].Files == 1 && s[0].LastError == "" && !s[0].Last.IsZero()
	})
	r.have(pod("b", corev1.PodRunning))
	c := r.job(t, "web-ann").Spec.Template.Spec
	if got := strings.Join(append(c.Containers[0].Command, c.Containers[0].Args...), " "); got != "/.kubevpn/traffic supervise --dir /site --restart -- /web" {
		t.Errorf("the container runs %s", got)
	}
	if i := c.InitContainers[0]; i.Image != "kubevpn:1" || !slices.Equal(i.Args, []string{"copy", "/.kubevpn/traffic"}) {
		t.Errorf("%+v", i)
	}
	r.end()
}

func TestCloneFailsWhenNoFileArrives(t *testing.T) {
	w := newWorld()
	to := t.TempDir()
	if err := os.WriteFile(filepath.Join(to, "a"), nil, 0o644); err != nil { // no directory
		t.Fatal(err)
	}
	containers(t, w, func(pod string) string { return filepath.Join(to, "a", pod) })
	r := w.run(t, api.CloneSpec{Sync: []api.SyncPair{{Local: local(t), Remote: "/site"}}}, func(c *Clone) { c.syncGrace = 300 * time.Millisecond })
	r.have(pod("a", corev1.PodRunning))
	err := <-r.ended
	if e := api.AsError(err); e == nil || e.Code != api.ExitNotReady || !strings.HasPrefix(e.Message, "cannot copy files to /site of the clone web-ann: at the other end: ") ||
		!strings.HasSuffix(e.Message, ": not a directory") {
		t.Errorf("%v", err)
	}
	if j := r.job(t, "web-ann"); j != nil {
		t.Errorf("left: %+v", j)
	}
}

// readyAre returns the names of the pods to which requests go.
func (r *running) readyAre() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var names []string
	if len(r.told) > 0 {
		for _, p := range r.told[len(r.told)-1] {
			if p.Ready {
				names = append(names, p.Name)
			}
		}
	}
	return strings.Join(names, " ")
}

// TestRequestsWaitForFiles checks that requests go to each pod once it has the files, and to a restarted container once
// it has them again.
func TestRequestsWaitForFiles(t *testing.T) {
	w := newWorld()
	to := t.TempDir()
	containers(t, w, func(pod string) string { return filepath.Join(to, pod) })
	into, closed := w.dial, make(chan struct{})
	close(closed)
	doors := map[string]chan struct{}{"a": closed, "b": make(chan struct{})}
	var mu sync.Mutex
	w.dial = func(pod string, command []string) net.Conn {
		mu.Lock()
		door := doors[pod]
		mu.Unlock()
		select {
		case <-door:
			return into(pod, command)
		default:
			ours, theirs := net.Pipe()
			theirs.Close()
			return ours
		}
	}
	container := func(name, id string) corev1.Pod {
		p := pod(name, corev1.PodRunning)
		p.Status.ContainerStatuses[0].ContainerID = id
		return p
	}
	r := w.run(t, api.CloneSpec{Replicas: 2, Sync: []api.SyncPair{{Local: local(t), Remote: "/site"}}},
		func(c *Clone) { c.syncGrace = time.Hour }) // files do not reach b
	r.have(container("a", "a1"), container("b", "b1"))
	<-r.Begun()
	if got := r.readyAre(); got != "a" {
		t.Errorf("requests go to %q", got)
	}
	testenv.Until(t, "the reason is in the status", func() bool {
		s := r.Status()
		return len(s.Pods) == 2 && !s.Pods[1].Ready && s.Pods[1].Reason != "" && s.State == api.CloneRunning
	})
	close(doors["b"])
	testenv.Until(t, "both", func() bool { return r.readyAre() == "a b" })

	// A restarted container is ready at once.
	again := make(chan struct{})
	mu.Lock()
	doors["a"] = again
	mu.Unlock()
	if err := os.RemoveAll(filepath.Join(to, "a")); err != nil {
		t.Fatal(err)
	}
	r.have(container("a", "a2"), container("b", "b1"))
	testenv.Until(t, "b alone", func() bool { return r.readyAre() == "b" })
	close(again)
	testenv.Until(t, "both again", func() bool { return r.readyAre() == "a b" })
	if _, err := os.Stat(filepath.Join(to, "a", "page")); err != nil {
		t.Error(err)
	}
	r.end()
}

func TestCloneFailsWhenNoFileCanBeWritten(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: only Linux has /proc, in which root cannot write either")
	}
	w := newWorld()
	containers(t, w, func(string) string { return "/proc" })
	r := w.run(t, api.CloneSpec{Sync: []api.SyncPair{{Local: local(t), Remote: "/site"}}}, func(c *Clone) { c.syncGrace = 300 * time.Millisecond })
	r.have(pod("a", corev1.PodRunning))
	select {
	case <-r.Begun():
		t.Error("the clone started without files")
		r.end()
	case err := <-r.ended:
		if e := api.AsError(err); e == nil || e.Code != api.ExitNotReady || !strings.HasPrefix(e.Message, "cannot copy files to /site of the clone web-ann: page: ") {
			t.Errorf("%v", err)
		}
	}
	if got := r.readyAre(); got != "" {
		t.Errorf("requests went to %q", got)
	}
}

// TestRejectedFileIsNamed checks that a file that cannot be written does not keep the clone from starting.
func TestRejectedFileIsNamed(t *testing.T) {
	w := newWorld()
	to, from := t.TempDir(), local(t)
	containers(t, w, func(pod string) string { return filepath.Join(to, pod) })
	if err := os.Symlink("/nowhere", filepath.Join(from, "link")); err != nil {
		t.Skipf("SKIPPED: this system has no symbolic links: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(to, "a", "link", "in its way"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := w.run(t, api.CloneSpec{Sync: []api.SyncPair{{Local: from, Remote: "/site"}}})
	r.have(pod("a", corev1.PodRunning))
	<-r.Begun()
	if got := r.warnings(); len(got) != 1 || !strings.HasPrefix(got[0], "/site: link: ") {
		t.Errorf("warnings: %q", got)
	}
	r.end()
}

func TestCloneFailsWhenProgramEndsBeforeFiles(t *testing.T) {
	w := newWorld()
	w.dial = func(string, []string) net.Conn { // does not answer
		ours, theirs := net.Pipe()
		t.Cleanup(func() { theirs.Close() })
		return ours
	}
	r := w.run(t, api.CloneSpec{Sync: []api.SyncPair{{Local: local(t), Remote: "/site"}}})
	r.have(pod("a", corev1.PodRunning))
	testenv.Until(t, "the pod", func() bool { return len(r.Status().Pods) == 1 })
	r.have(pod("a", corev1.PodPending, waiting("CrashLoopBackOff")))
	r.fails(api.ExitNotReady, "the clone web-ann does not start: app: CrashLoopBackOff")
}
