//go:build e2e && linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
)

const pythonRef = "docker.io/kubevpn/python:e2e"

var buildPython = sync.OnceValue(func() error { return build.Python(context.Background(), bin, pythonRef) })

// loadPython loads an image with a Python interpreter into the cluster.
func (w *world) loadPython(t *testing.T) {
	t.Helper()
	if err := buildPython(); err != nil {
		t.Fatal(err)
	}
	if err := w.Load(t.Context(), filepath.Join(bin, "python.tar")); err != nil {
		t.Fatal(err)
	}
}

// source returns a file of testdata with another greeting, as after an edit.
func source(t *testing.T, name, greeting string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	edited := strings.Replace(string(text), `"original"`, `"`+greeting+`"`, 1)
	if greeting != "original" && edited == string(text) {
		t.Fatalf("%s has no greeting", name)
	}
	return []byte(edited)
}

// save writes a file as many editors do: to a temporary file that it then renames.
func save(t *testing.T, file string, text []byte) {
	t.Helper()
	if err := os.WriteFile(file+"~", text, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+"~", file); err != nil {
		t.Fatal(err)
	}
}

// edited waits until the clone answers with the edited text, and checks that requests without the header get the old
// answer.
func (v *visitor) edited(t *testing.T, service, mineIs, othersAre string) {
	t.Helper()
	began := time.Now()
	testenv.Eventually(t, 60*time.Second, func() error { return v.of(service, mineIs, mine, me) })
	t.Logf("%q was served %v after the save", mineIs, time.Since(began).Round(time.Millisecond))
	for range 4 {
		if err := v.of(service, othersAre); err != nil {
			t.Errorf("without the header: %v", err)
		}
	}
}

// cloneGo builds a Go program on the laptop after each edit and runs it in the cluster.
func cloneGo(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	src, out := t.TempDir(), t.TempDir()
	build := func(greeting string) {
		t.Helper()
		save(t, filepath.Join(src, "main.go"), source(t, "server.go.txt", greeting))
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(out, "server"), "main.go")
		cmd.Dir, cmd.Env = src, append(os.Environ(), "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	build("first")
	l.clone(t, s, "--headers", mine+"="+me, "--name", "golang", "--sync", out+":/scratch/bin", "--restart-on-sync", "--", "/scratch/bin/server")
	if err := v.of(service, "first of golang-", mine, me); err != nil {
		t.Errorf("right after the command: %v", err)
	}
	v.edited(t, service, "first of golang-", "shop-")
	build("second")
	v.edited(t, service, "second of golang-", "shop-")
	if i := l.intercept(t); len(i.Clone.Sync) != 1 || !i.Clone.Sync[0].Synced || i.Clone.Sync[0].Files != 1 || i.Clone.Sync[0].Last.IsZero() {
		t.Errorf("status: %+v", i.Clone)
	}
	l.leave(t, s)
	s.noClone(t)
}

const pythonService = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: py, namespace: NAMESPACE}
spec:
  selector: {matchLabels: {app: py}}
  template:
    metadata: {labels: {app: py}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: source, configMap: {name: py}}, {name: scratch, emptyDir: {}}]
      containers:
      - name: py
        image: PYTHON_IMAGE
        imagePullPolicy: Never
        args: ["-u", /source/server.py]
        ports: [{containerPort: 8080, name: http}]
        volumeMounts: [{name: source, mountPath: /source}, {name: scratch, mountPath: /scratch}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: py, namespace: NAMESPACE}
spec: {selector: {app: py}, ports: [{port: 80, targetPort: http}]}
`

// clonePython edits a Python program on the laptop and runs it in the cluster, in the interpreter of its image.
func clonePython(t *testing.T, l *laptop, s *shop, v *visitor) {
	s.loadPython(t)
	s.kubectl(t, "-n", s.namespace, "create", "configmap", "py", "--from-file=server.py=testdata/server.py")
	s.apply(t, strings.NewReplacer("NAMESPACE", s.namespace, "PYTHON_IMAGE", pythonRef).Replace(pythonService))
	py := &shop{world: s.world, namespace: s.namespace, workload: "deployment/py"}
	py.rolledOut(t)
	service := "http://" + s.clusterIP(t, s.namespace, "py") + "/"
	testenv.Eventually(t, time.Minute, func() error { return v.of(service, "original of py-") })
	dir := t.TempDir()
	file := filepath.Join(dir, "server.py")
	save(t, file, source(t, "server.py", "first"))
	l.clone(t, py, "--headers", mine+"="+me, "--name", "snake", "--sync", dir+":/scratch/src", "--restart-on-sync", "--", build.PythonProgram, "-u", "/scratch/src/server.py")
	v.edited(t, service, "first of snake-", "original of py-")
	save(t, file, source(t, "server.py", "second"))
	v.edited(t, service, "second of snake-", "original of py-")
	t.Run("broken_program_recovers_with_the_next_save", func(t *testing.T) {
		save(t, file, []byte("this is no Python\n"))
		// The pod is not ready without its program, so the application answers.
		testenv.Eventually(t, time.Minute, func() error { return v.of(service, "original of py-", mine, me) })
		testenv.Eventually(t, time.Minute, func() error {
			if i := l.intercept(t); i.Clone.State != api.CloneWaiting {
				return fmt.Errorf("status: %+v", i.Clone)
			}
			return nil
		})
		save(t, file, source(t, "server.py", "mended"))
		v.edited(t, service, "mended of snake-", "original of py-")
	})
	l.leave(t, py)
	if err := v.of(service, "original of py-", mine, me); err != nil {
		t.Errorf("after leave: %v", err)
	}
	s.noClone(t)
}

// cloneUnwritable checks that the command reports a directory that it cannot write to, and leaves nothing.
func cloneUnwritable(t *testing.T, l *laptop, s *shop) {
	dir := t.TempDir()
	save(t, filepath.Join(dir, "page"), []byte("a page"))
	r := l.run(t, "kubevpn", "clone", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--name", "shut", "--sync", dir+":/etc", "--command", "/app")
	if r.code != int(api.ExitNotReady) || !strings.Contains(r.stderr, "cannot copy files to /etc of the clone shut: page: permission denied") {
		t.Error(r)
	}
	s.leftNothing(t, l)
}

// leftNothing checks that a failed clone and its intercept are gone.
func (s *shop) leftNothing(t *testing.T, l *laptop) {
	t.Helper()
	s.noClone(t)
	if n := len(l.status(t).Intercepts); n != 0 {
		t.Errorf("%d intercepts", n)
	}
}

// cloneDoesNotStart checks that the command prints the reason of Kubernetes or of the container runtime.
func cloneDoesNotStart(t *testing.T, l *laptop, s *shop) {
	s.apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: cloned-full}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: full, namespace: cloned-full}
spec: {hard: {pods: "0"}}
`)
	for _, tt := range []struct {
		name string
		args []string
		code api.ExitCode
		want []string
	}{
		{"crash", []string{"--command", "/app", "--command=-nope"}, api.ExitNotReady, []string{
			"the clone unborn does not start: app: CrashLoopBackOff", "The last lines of its container app:", "flag provided but not defined: -nope"}},
		{"no_program", []string{"--command", "/no/such/program"}, api.ExitNotReady, []string{"the clone unborn does not start: app: ", "/no/such/program: no such file or directory"}},
		{"no_image", []string{"--target-image", "docker.io/kubevpn/none:e2e"}, api.ExitImagePull, []string{"the clone unborn does not start: app: ErrImageNeverPull"}},
		{"quota", []string{"--target-namespace", "cloned-full"}, api.ExitNotReady, []string{"the clone unborn does not start: Error creating: pods ", "exceeded quota: full"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := l.run(t, append([]string{"kubevpn", "clone", s.workload, "-n", s.namespace, "--headers", mine + "=" + me, "--name", "unborn"}, tt.args...)...)
			if r.code != int(tt.code) {
				t.Error(r)
			}
			for _, want := range tt.want {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("%v\nwant %q", r, want)
				}
			}
			s.leftNothing(t, l)
		})
	}
}

const cloneKindsManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: clonekinds}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: store, namespace: clonekinds}
spec:
  serviceName: store
  selector: {matchLabels: {app: store}}
  template:
    metadata: {labels: {app: store}}
    spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: v1
kind: Service
metadata: {name: store, namespace: clonekinds}
spec: {clusterIP: None, selector: {app: store}, ports: [{name: web, port: 8080, targetPort: web}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: each, namespace: clonekinds}
spec:
  selector: {matchLabels: {app: each}}
  template:
    metadata: {labels: {app: each}}
    spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: v1
kind: Pod
metadata: {name: alone, namespace: clonekinds, labels: {app: alone}}
spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: report, namespace: clonekinds}
spec:
  schedule: "0 3 1 1 *"
  jobTemplate:
    spec:
      template:
        metadata: {labels: {app: report}}
        spec:
          restartPolicy: Never
          containers:
          - name: report
            image: PYTHON_IMAGE
            imagePullPolicy: Never
            args: ["-c", "import os; print('a report for', os.environ['WHO'])"]
            env: [{name: WHO, value: everybody}]
`

// cloneKinds clones each kind of workload; the clone of a CronJob runs once, immediately.
func cloneKinds(t *testing.T, l *laptop, v *visitor) {
	l.loadPython(t)
	l.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "PYTHON_IMAGE", pythonRef).Replace(cloneKindsManifest))
	const ns = "clonekinds"
	l.kubectl(t, "-n", ns, "rollout", "status", "statefulset/store", "--timeout=120s")
	l.kubectl(t, "-n", ns, "rollout", "status", "daemonset/each", "--timeout=120s")
	l.kubectl(t, "-n", ns, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
	of := &shop{world: l.world, namespace: ns}
	for _, tt := range []struct{ workload, app string }{
		{"sts/store", "store"}, {"svc/store", "store"}, {"daemonset/each", "each"}, {"pod/alone", "alone"},
	} {
		t.Run(strings.ReplaceAll(tt.workload, "/", "_"), func(t *testing.T) {
			pods := l.pods(t, ns, "app="+tt.app)
			l.must(t, "kubevpn", "clone", tt.workload, "-n", ns, "--headers", mine+"="+me, "--name", "copy")
			for _, ip := range pods {
				url := "http://" + ip.String() + ":8080/"
				if err := v.of(url, "copy-", mine, me); err != nil {
					t.Error(err)
				}
				if err := v.of(url, tt.app); err != nil {
					t.Errorf("without the header: %v", err)
				}
			}
			// The copy may keep the labels of a bare pod, because no controller selects them.
			if now := l.pods(t, ns, "app="+tt.app); len(now) != len(pods) && tt.workload != "pod/alone" {
				t.Errorf("the pods were %v and are %v", pods, now)
			}
			l.must(t, "kubevpn", "leave", tt.workload, "-n", ns)
			for _, ip := range pods {
				if err := v.of("http://"+ip.String()+":8080/", tt.app, mine, me); err != nil {
					t.Errorf("after leave: %v", err)
				}
			}
			of.noClone(t)
		})
	}
	t.Run("cronjob_runs_once_at_once", func(t *testing.T) {
		r := l.run(t, "kubevpn", "clone", "cj/report", "-n", ns, "--headers", mine+"="+me)
		if r.code != int(api.ExitUsage) || !strings.Contains(r.stderr, "cronjob/report is a CronJob and receives no requests") {
			t.Error(r)
		}
		l.must(t, "kubevpn", "clone", "cj/report", "-n", ns, "--name", "now", "--env", "WHO=me")
		testenv.Eventually(t, time.Minute, func() error {
			if i := l.intercept(t); i.Clone.State != api.CloneDone {
				return fmt.Errorf("the clone is %s", i.Clone.State)
			}
			return nil
		})
		if out := l.kubectl(t, "-n", ns, "logs", "job/now"); out != "a report for me" {
			t.Errorf("the output is %q", out)
		}
		testenv.Eventually(t, time.Minute, func() error { // the Job's status is updated after its pod's
			if n := l.kubectl(t, "-n", ns, "get", "job", "now", "-o", "jsonpath={.status.succeeded}"); n != "1" {
				return fmt.Errorf("the Job succeeded %q times", n)
			}
			return nil
		})
		l.must(t, "kubevpn", "leave", "cronjob/report", "-n", ns)
		of.noClone(t)
		if jobs := l.kubectl(t, "-n", ns, "get", "jobs", "-o", "name"); jobs != "" {
			t.Errorf("left: %s", jobs)
		}
	})
}
