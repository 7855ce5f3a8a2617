package clone

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/filesync"
)

// containers are directories that files go to, one for each pod, as `traffic supervise` has them there.
func containers(t *testing.T, w *world, dir string) {
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
		target, err := filesync.NewTarget(filesync.TargetConfig{Dir: filepath.Join(dir, pod), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Error(err)
			ours.Close()
			return ours
		}
		serving.Go(func() { _ = target.Serve(ctx, theirs) }) // the laptop tells
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

// Each pod has the files before requests go to it, and what is saved later.
func TestFiles(t *testing.T) {
	w := newWorld()
	from, to := local(t), t.TempDir()
	containers(t, w, to)
	r := w.run(t, api.CloneSpec{Replicas: 2, Sync: []api.SyncPair{{Local: from, Remote: "/site"}}, Restart: true})
	r.have(pod("a", corev1.PodRunning))
	<-r.Begun()
	same := func(want string, pods ...string) {
		t.Helper()
		testenv.Eventually(t, 10*time.Second, func() error {
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
		t.Errorf("it has begun with %q, %v", got, err)
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

// A clone that files cannot go to is none: requests would meet what is in the image.
func TestNoFilesArrive(t *testing.T) {
	w := newWorld()
	to := t.TempDir()
	if err := os.WriteFile(filepath.Join(to, "a"), nil, 0o644); err != nil { // no directory
		t.Fatal(err)
	}
	containers(t, w, to+"/a")
	r := w.run(t, api.CloneSpec{Sync: []api.SyncPair{{Local: local(t), Remote: "/site"}}}, func(c *Clone) { c.syncTrouble = 300 * time.Millisecond })
	r.have(pod("a", corev1.PodRunning))
	err := <-r.ended
	if e := api.AsError(err); e == nil || e.Code != api.ExitNotReady || !strings.HasPrefix(e.Message, "no files reach /site of the clone web-ann: at the other end: ") ||
		!strings.HasSuffix(e.Message, ": not a directory") {
		t.Errorf("%v", err)
	}
	if j := r.job(t, "web-ann"); j != nil {
		t.Errorf("left: %+v", j)
	}
}
