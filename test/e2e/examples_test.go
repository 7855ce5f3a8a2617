//go:build e2e && linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// examplesSuite runs the commands of examples/README.md in order. The application of the suites replaces the image,
// which the nodes cannot pull.
func examplesSuite(t *testing.T, w *world) {
	root := moduleRoot(t)
	w.loadApp(t)
	manifest, err := os.ReadFile(filepath.Join(root, "examples", "web.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	replaced := regexp.MustCompile(`image: .*`).ReplaceAllString(string(manifest), "image: "+appRef)
	file := filepath.Join(t.TempDir(), "web.yaml")
	if err := os.WriteFile(file, []byte(replaced), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := w.tryKubectl(context.WithoutCancel(t.Context()), "delete", "--ignore-not-found", "-f", file); err != nil {
			t.Error(err)
		}
	})
	l := w.newLaptop(t, lab.Admin)
	commands := shellLines(t, filepath.Join(root, "examples", "README.md"))
	if len(commands) < 10 {
		t.Fatalf("got %d commands: the test reads the page wrongly", len(commands))
	}
	for _, line := range commands {
		command, comment, _ := strings.Cut(line, " #")
		command = strings.ReplaceAll(strings.TrimSpace(command), "examples/web.yaml", file)
		command = strings.ReplaceAll(command, "examples/", filepath.Join(root, "examples")+"/")
		if args, ok := strings.CutPrefix(command, "kubectl "); ok {
			w.kubectl(t, strings.Fields(args)...)
			if strings.Contains(args, "rollout status") {
				w.serves(t, w.clusterIP(t, "kubevpn-example", "web")+":80")
			}
			continue
		}
		if server, ok := strings.CutSuffix(command, " &"); ok {
			l.serve(t, server)
			continue
		}
		command = strings.ReplaceAll(command, "kubevpn ", filepath.Join(bin, "kubevpn")+" ")
		r := l.sh(t, "%s", command)
		if r.code != 0 {
			t.Fatal(r)
		}
		if local := strings.Contains(comment, "this machine"); strings.Contains(command, "curl") &&
			(r.stdout == "" || strings.Contains(r.stdout, "hello from this machine") != local) {
			t.Errorf("want an answer of%s: %v", strings.TrimSuffix(comment, " answers"), r)
		}
		if strings.Contains(command, "printenv") && r.stdout != "hello from the cluster\n" {
			t.Error(r)
		}
	}
}

// serves waits until kube-proxy translates a ClusterIP on each node, of which it hears a moment after the pods are ready.
func (w *world) serves(t *testing.T, address string) {
	t.Helper()
	for n := range w.Config().Nodes {
		testenv.Eventually(t, time.Minute, func() error {
			c, err := dialIn(fmt.Sprintf("/run/netns/%s-node%d", w.Config().Name, n+1), address)
			if err == nil {
				c.Close()
			}
			return err
		})
	}
}

// serve runs a server on the laptop until the test ends, and waits until its port 8080 accepts.
func (l *laptop) serve(t *testing.T, command string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	server := l.command(ctx, t, "sh", "-c", "exec "+command)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = server.Wait() // cancel ended it
	})
	r := l.sh(t, "curl -s --retry 60 --retry-delay 1 --retry-connrefused -o /dev/null http://127.0.0.1:8080/")
	if r.code != 0 {
		t.Fatal(r)
	}
}
