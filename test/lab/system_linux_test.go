package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

func TestParseMountsReadsMountinfo(t *testing.T) {
	const mountinfo = `22 27 0:21 / /proc rw,relatime - proc proc rw
40 27 254:0 /x /mnt/with\040space rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
broken
41 23 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
`
	want := []mountPoint{{"/proc", "proc", "rw"}, {"/mnt/with space", "ext4", "rw,discard"}, {"/sys/fs/cgroup/pids", "cgroup", "rw,pids"}}
	if diff := cmp.Diff(want, parseMounts(mountinfo), cmp.AllowUnexported(mountPoint{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add("22 27 0:21 / /proc rw,relatime - proc proc rw\n")
	f.Add(`1 2 3:4 / /a\04 rw - x y z`)
	f.Fuzz(func(_ *testing.T, s string) { parseMounts(s) })
}

func TestParseStatReadsStartTimeAndState(t *testing.T) {
	const tail = " 1 2 3 0 -1 4194560 100 200 0 0 10 5 0 0 20 0 9 0 123456 1000 50"
	for _, test := range []struct {
		stat   string
		start  uint64
		zombie bool
		fails  bool
	}{
		{stat: "42 (kube) S" + tail, start: 123456},
		{stat: "42 (a) b) R) S" + tail, start: 123456},
		{stat: "42 (kube) Z" + strings.Replace(tail, " 0 9 0 ", " 0 1 0 ", 1), start: 123456, zombie: true},
		{stat: "42 (kube) Z" + tail, start: 123456}, // eight threads are left, which hold its sockets
		{stat: "42 (kube) S 1 2", fails: true},
		{stat: "", fails: true},
	} {
		start, zombie, err := parseStat(test.stat)
		if start != test.start || zombie != test.zombie || (err != nil) != test.fails {
			t.Errorf("%q: %d, %v, %v", test.stat, start, zombie, err)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("42 (kube) S 1 2 3 0 -1 4194560 100 200 0 0 10 5 0 0 20 0 9 0 123456 1000 50")
	f.Fuzz(func(_ *testing.T, s string) { _, _, _ = parseStat(s) })
}

func TestRunningComparesStartTimes(t *testing.T) {
	start, _, err := processStart(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if p := (Process{PID: os.Getpid(), Start: start}); !p.Running() {
		t.Error("this process does not run")
	}
	if p := (Process{PID: os.Getpid(), Start: start - 1}); p.Running() {
		t.Error("an earlier process with our PID is reported as running")
	}
	command := exec.Command("true")
	if err := command.Run(); err != nil {
		t.Fatal(err)
	}
	if p := (Process{PID: command.Process.Pid, Start: start}); p.Running() {
		t.Error("a process that has ended is reported as running")
	}
}

func TestBelowComparesWholeElements(t *testing.T) {
	for _, test := range []struct {
		path, dir string
		want      bool
	}{
		{"/run", "/run", true}, {"/run/x", "/run", true}, {"/runner", "/run", false}, {"/", "/run", false}, {"/x", "/", true},
	} {
		if got := below(test.path, test.dir); got != test.want {
			t.Errorf("below(%q, %q) = %v", test.path, test.dir, got)
		}
	}
}

func TestPlainHostsKeepsOnlyFilesAndDNS(t *testing.T) {
	got := plainHosts("passwd: files systemd\nhosts: files mymachines resolve [!UNAVAIL=return] dns\nnetworks: files\n")
	if want := "passwd: files systemd\nhosts: files dns\nnetworks: files\n"; got != want {
		t.Errorf("got %q", got)
	}
}

func TestAttachReadsTheState(t *testing.T) {
	dir := t.TempDir()
	c := Config{Name: "x", Dir: dir}
	if _, err := Attach(c); !errors.Is(err, ErrNotUp) || !strings.Contains(err.Error(), "x: lab is not up: run 'lab up'") {
		t.Errorf("attaching to nothing: %v", err)
	}
	l := New(c)
	if err := os.MkdirAll(filepath.Join(l.dir(), "pki"), 0o755); err != nil {
		t.Fatal(err)
	}
	err := l.update(func(s *state) {
		*s = state{Name: "x", Nodes: 3, ProxyMode: ProxyNone, IPv6: true, Ranges: 2, Ready: true, Programs: programs{Kube: "/k"}}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.record(Process{Name: "etcd", Place: "node1", PID: 1 << 22, Start: 7}); err != nil {
		t.Fatal(err)
	}
	if err := l.record(Process{Name: "etcd", Place: "node1", PID: 1<<22 + 1, Start: 8}); err != nil {
		t.Fatal(err)
	}
	attached, err := Attach(Config{Name: "x", Dir: dir, Nodes: 1})
	if err != nil {
		t.Fatal(err)
	}
	if got := attached.Config().shape(); got != "3 nodes, no kube-proxy, IPv4 and IPv6, second ranges" {
		t.Errorf("attached to %q", got)
	}
	status, err := attached.Status()
	if err != nil {
		t.Fatal(err)
	}
	want := []ProcessStatus{{"etcd", 1<<22 + 1, false, filepath.Join(dir, "x/log/etcd.log")}}
	if diff := cmp.Diff(want, status.Processes); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
	if status.Up || status.Server != "https://10.199.0.1:6443" || len(status.Nodes) != 3 {
		t.Errorf("status: %+v", status)
	}
	if !strings.Contains(status.String(), "DEAD, see ") {
		t.Errorf("status as text:\n%s", status)
	}
	if names, err := List(dir); err != nil || !cmp.Equal(names, []string{"x"}) {
		t.Errorf("labs: %v, %v", names, err)
	}
	if _, err := attached.Kubeconfig("root"); err == nil || !strings.Contains(err.Error(), `no user "root": want admin, dev or token`) {
		t.Errorf("kubeconfig of an unknown user: %v", err)
	}
	if _, err := attached.Command(context.Background(), "node4", "true"); err == nil || !strings.Contains(err.Error(), "want router, laptop, node1, node2, node3") {
		t.Errorf("a command in an unknown place: %v", err)
	}
	if err := os.WriteFile(l.stateFile(), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Attach(c); err == nil || errors.Is(err, ErrNotUp) {
		t.Errorf("attaching to a broken state: %v", err)
	}
}

// TestPollReportsDeadProcess checks the message for a component that does not start.
func TestPollReportsDeadProcess(t *testing.T) {
	l := New(Config{Name: "x", Dir: t.TempDir()})
	if err := os.MkdirAll(filepath.Join(l.dir(), "log"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.logFile("etcd"), []byte(strings.Repeat("before\n", 50)+"cannot open port\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := l.record(Process{Name: "etcd", PID: 1 << 22, Start: 7}); err != nil {
		t.Fatal(err)
	}
	err := l.poll(t.Context(), time.Minute, []string{"kubelet", "etcd"}, func(context.Context) error { return io.EOF })
	if err == nil || !strings.HasPrefix(err.Error(), "etcd has died; the end of "+l.logFile("etcd")+":\nbefore\n") || !strings.HasSuffix(err.Error(), "\ncannot open port") || strings.Count(err.Error(), "before") != 19 {
		t.Errorf("got %v", err)
	}
	l = New(Config{Name: "y", Dir: t.TempDir()})
	err = l.poll(t.Context(), time.Millisecond, nil, func(context.Context) error { return io.EOF })
	if err == nil || err.Error() != "gave up after 1ms: EOF" {
		t.Errorf("got %v", err)
	}
}

func TestLockExcludesOtherPrograms(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "labs")
	first, second := New(Config{Name: "x", Dir: dir}), New(Config{Name: "x", Dir: dir})
	unlock, err := first.lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.lock(); !errors.Is(err, errLocked) {
		t.Errorf("a second lock: %v", err)
	}
	unlockOther, err := New(Config{Name: "y", Dir: dir}).lock()
	if err != nil {
		t.Errorf("another lab's lock: %v", err)
	}
	unlock()
	unlockOther()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("locks without labs left something: %v", err)
	}
	if unlock, err = second.lock(); err != nil {
		t.Fatal(err)
	}
	unlock()
}

// A program that another goroutine starts holds a copy of each descriptor until its exec.
func TestUnlockReleasesCopiesOfTheLock(t *testing.T) {
	dir := t.TempDir()
	unlock, err := New(Config{Name: "x", Dir: dir}).lock()
	if err != nil {
		t.Fatal(err)
	}
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := slices.IndexFunc(descriptors, func(d os.DirEntry) bool {
		to, _ := os.Readlink("/proc/self/fd/" + d.Name()) // one is closed by now
		return to == filepath.Join(dir, "x.lock")
	})
	if n < 0 {
		t.Fatal("the lock has no descriptor")
	}
	fd, err := strconv.Atoi(descriptors[n].Name())
	if err != nil {
		t.Fatal(err)
	}
	held, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(held)
	if err := os.Mkdir(filepath.Join(dir, "x"), 0o755); err != nil { // the lab remains, and so does the lock's file
		t.Fatal(err)
	}
	unlock()
	if unlock, err = New(Config{Name: "x", Dir: dir}).lock(); err != nil {
		t.Fatal(err)
	}
	unlock()
}

// TestLockSurvivesTheEndOfOtherLabs checks that a lab can be locked while the last other one removes their directory.
func TestLockSurvivesTheEndOfOtherLabs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "labs")
	var group errgroup.Group
	for _, name := range []string{"a", "b", "c", "d"} {
		group.Go(func() error {
			for range 1000 {
				unlock, err := New(Config{Name: name, Dir: dir}).lock()
				if err != nil {
					return err
				}
				unlock()
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

func TestNamesInFindsNamesOfTheLab(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"lab-laptop", "lab-router", "lab-node1", "lab-node12", "lab-node", "lab-two-router",
		"other-laptop", "lab", "lab-laptop2", "lab-docker", "lab-laptop20"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := New(Config{}).namesIn(dir)
	if want := []string{"lab-docker", "lab-laptop", "lab-laptop2", "lab-node1", "lab-node12", "lab-router"}; err != nil || !cmp.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := New(Config{}).namesIn(filepath.Join(dir, "none")); err != nil || got != nil {
		t.Errorf("no directory: %v, %v", got, err)
	}
}

// TestHashDependsOnEverySource checks that every source of a program changes its place in the cache.
func TestHashDependsOnEverySource(t *testing.T) {
	source := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		file := filepath.Join(source, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := program{name: "x", dir: "x", extra: []string{"go.mod"}}
	hash := func() string {
		t.Helper()
		h, err := p.hash(source)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	write("go.mod", "module a\n")
	write("x/main.go", "package main\n")
	first := hash()
	write("x/main_test.go", "package main\n")
	write("x/README", "text\n")
	if got := hash(); got != first {
		t.Error("a test changed the hash")
	}
	for _, change := range [][2]string{{"x/main.go", "package main // changed\n"}, {"x/more.go", "package main\n"}, {"x/go.sum", "sum\n"}, {"go.mod", "module b\n"}} {
		before := hash()
		write(change[0], change[1])
		if hash() == before {
			t.Errorf("a change of %s did not change the hash", change[0])
		}
	}
}

func TestKubernetesVersionReadsTheModule(t *testing.T) {
	source, err := findSource("")
	if err != nil {
		t.Fatal(err)
	}
	flags, err := kubernetesVersion(source, "")
	if err != nil || !strings.Contains(flags, "-X k8s.io/component-base/version.gitMinor=37") {
		t.Errorf("%s, %v", flags, err)
	}
	if flags, err := kubernetesVersion(source, "1.31.mod"); err != nil || !strings.Contains(flags, "-X k8s.io/component-base/version.gitMinor=31") {
		t.Errorf("1.31: %s, %v", flags, err)
	}
	if _, err := kubernetesVersion(t.TempDir(), ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no go.mod: %v", err)
	}
	if _, err := findSource(t.TempDir()); err == nil || !strings.Contains(err.Error(), "run it from the repository") {
		t.Errorf("no repository: %v", err)
	}
}

func TestProgressOnPipePrintsLines(t *testing.T) {
	var b strings.Builder
	p := newProgress(&b)
	done := p.step("building %s", "x")
	done(nil)
	p.step("failing")(io.EOF)
	p.say("ready")
	if want := "building x ...\nfailing ...\nready\n"; b.String() != want {
		t.Errorf("got %q", b.String())
	}
}

func TestBuildSaysHowFarItIs(t *testing.T) {
	var c compiled
	steps := []struct{ output, status string }{
		{"", ""},
		{"go: downloading k8s.io/api v0.37.2\ngo: downloading gopkg.in/yaml.v3", "downloaded 1 modules"},
		{" v3.0.1\ninternal/goarch\nk8s.io/api/core/v1\n", "2 of 4 packages, about 10s left"},
		{"# k8s.io/api/apps/v1\napps.go:3:2: undefined: x\ngithub.com/go-logr/logr\n", "3 of 4 packages, about 10s left"},
		{"kubevpn/test/lab/cluster/kube\n", "linking"},
	}
	for _, step := range steps {
		fmt.Fprint(&c, step.output)
		if c.count > 0 && c.total == 0 {
			c.begin(4)
		}
		if got := c.status(); got != step.status {
			t.Errorf("after %q: %q, want %q", step.output, got, step.status)
		}
	}
	if got := c.rest(); got != "# k8s.io/api/apps/v1\napps.go:3:2: undefined: x" {
		t.Errorf("errors: %q", got)
	}
}

func TestLongStepOnATerminalShowsItsStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b strings.Builder
		p := &progress{w: &b, terminal: true}
		done := p.counted(func() string { return "1 of 2 packages" }, "building x")
		time.Sleep(1500 * time.Millisecond)
		done(nil)
		if want := "building x ...\rbuilding x ... 1s  1 of 2 packages\x1b[K\rbuilding x ... done in 1.5s\x1b[K\n"; b.String() != want {
			t.Errorf("got %q", b.String())
		}
	})
}

// The lab builds etcd and CoreDNS in a quarter of the time if they use Kubernetes' versions of the modules that they
// share.
func TestProgramsShareTheModulesOfKubernetes(t *testing.T) {
	requires := func(program string) map[string]string {
		text, err := os.ReadFile(filepath.Join("cluster", program, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		versions := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^\s*(?:require )?(\S+) (v\S+)`).FindAllStringSubmatch(string(text), -1) {
			versions[m[1]] = m[2]
		}
		return versions
	}
	kubernetes := requires("kube")
	for _, program := range []string{"etcd", "coredns"} {
		shared := 0
		for module, version := range requires(program) {
			if kubernetes[module] == version {
				shared++
			} else if kubernetes[module] != "" {
				t.Errorf("%s uses %s %s, and Kubernetes %s: run go get %[2]s@%[4]s in test/lab/cluster/%[1]s", program, module, version, kubernetes[module])
			}
		}
		if shared < 20 {
			t.Errorf("%s shares %d modules with Kubernetes", program, shared)
		}
	}
}
