//go:build e2e && linux

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// keptUser and keptGroup are those of the containers of podKept.
const keptUser, keptGroup = 64123, 64124

// podKept is a workload with a claim and nothing in its image but a program; and one whose image has a shell.
const podKept = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: kept}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteMany]
  storageClassName: made
  claimRef: {namespace: podded, name: kept}
  hostPath: {path: DISK, type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: kept, namespace: podded}
spec: {accessModes: [ReadWriteMany], storageClassName: made, resources: {requests: {storage: 1Mi}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: kept, namespace: podded}
spec:
  selector: {matchLabels: {app: kept}}
  template:
    metadata: {labels: {app: kept}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsUser: 64123, runAsGroup: 64124}
      volumes:
      - {name: data, persistentVolumeClaim: {claimName: kept}}
      - {name: down, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.namespace}}]}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext: {readOnlyRootFilesystem: true}
        volumeMounts: [{name: data, mountPath: /data}, {name: down, mountPath: /data/down}]
---
apiVersion: v1
kind: Namespace
metadata: {name: podded-exec}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: shell, namespace: podded-exec}
spec:
  selector: {matchLabels: {app: shell}}
  template:
    metadata: {labels: {app: shell}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: data, emptyDir: {}}, {name: tmp, emptyDir: {}}]
      containers:
      - name: app
        image: ` + shellRef + `
        imagePullPolicy: Never
        command: [sleep, "1000"]
        volumeMounts: [{name: data, mountPath: /data}, {name: tmp, mountPath: /tmp}]
`

// keep creates the workloads of podKept.
func (p *podded) keep(t *testing.T) {
	t.Helper()
	var err error
	if p.disk, err = os.MkdirTemp("", "kubevpn-e2e-kept-"); err != nil { // others cannot enter t.TempDir
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(p.disk) })
	if err := os.Chown(p.disk, keptUser, keptGroup); err != nil {
		t.Fatal(err)
	}
	p.loadShell(t)
	p.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "DISK", p.disk).Replace(podKept))
}

func (p *podded) kept() *shop  { return &shop{p.world, podNamespace, "deployment/kept"} }
func (p *podded) shell() *shop { return &shop{p.world, "podded-exec", "deployment/shell"} }

// withVolume runs a script with a volume of a pod at /data.
func (p *podded) withVolume(t *testing.T, l *laptop, s *shop, how, script string) result {
	t.Helper()
	return l.dev(t, s, "--isolate", "--volume", "data="+how, "--", "sh", "-euc", script)
}

// podVolumes checks that programs work with a volume of a pod as with a local directory.
func podVolumes(t *testing.T, p *podded) {
	for name, check := range map[string]func(*testing.T, *podded){
		"git":                      keptGit,
		"postgres":                 keptPostgres,
		"redis":                    keptRedis,
		"sqlite":                   keptSQLite,
		"read_only":                keptReadOnly,
		"restricted":               keptRestricted,
		"nobody_may_add_container": keptExec,
		"no_fuse":                  keptNoFUSE,
		"kill_9":                   keptKilled,
		"copy":                     keptCopy,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t, p)
		})
	}
}

// expect checks what a program said.
func expect(t *testing.T, r result, want string) {
	t.Helper()
	if r.code != 0 || strings.TrimSpace(r.stdout) != want {
		t.Errorf("%v\nwant %q", r, want)
	}
}

// keptGit uses renames, locks by O_EXCL, hard links, symbolic links and many files.
func keptGit(t *testing.T, p *podded) {
	r := p.withVolume(t, p.eve, p.kept(), "remote:rw", `
		cd /data; export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
		git init -q repo; cd repo; for n in $(seq 100); do echo $n >file$n; done; ln -s file1 link; git add .; git commit -qm first
		git clone -q . ../copy; cd ../copy; git gc -q; git fsck --strict 2>&1; git status --porcelain; git rev-list --count HEAD; readlink link`)
	expect(t, r, "1\nfile1")
	out, err := exec.Command("git", "-c", "safe.directory=*", "-C", filepath.Join(p.disk, "copy"), "status", "--porcelain").CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("on the node: %s, %v", out, err)
	}
	info, err := os.Stat(filepath.Join(p.disk, "copy/file1"))
	if err != nil {
		t.Fatal(err)
	}
	if of := info.Sys().(*syscall.Stat_t); of.Uid != keptUser || of.Gid != keptGroup {
		t.Errorf("a file belongs to %d:%d on the node", of.Uid, of.Gid)
	}
}

// keptPostgres uses fsync of files and directories, and recovers after a crash.
func keptPostgres(t *testing.T, p *podded) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(found) == 0 {
		t.Fatal(found, err)
	}
	of, err := user.Lookup("postgres") // it wants a user with a name, and not root
	if err != nil {
		t.Fatal(err)
	}
	uid, err := strconv.ParseUint(of.Uid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	l := p.laptopOf(t, person{name: "postgres", uid: uint32(uid)})
	l.within = p.eve.within
	r := p.withVolume(t, l, p.kept(), "remote:rw", `
		PATH=$PATH:`+found[0]+`; cd /data; initdb --no-sync -D db -U me -A trust >/dev/null # what follows syncs
		begin() { postgres -D db -k "" -h 127.0.0.1 -c logging_collector=off >log 2>&1 & until psql -h 127.0.0.1 -U me -c "select 1" postgres >/dev/null 2>&1; do kill -0 $!; sleep 0.2; done; }
		begin; psql -q -h 127.0.0.1 -U me -c "create table t as select generate_series(1, 10000) n" postgres
		kill -9 $!; wait $! || true; rm db/postmaster.pid; begin
		psql -At -h 127.0.0.1 -U me -c "select sum(n) from t" postgres; kill -INT $!; wait $!`)
	expect(t, r, "50005000")
}

// keptRedis appends to a file, and replaces it while it is used.
func keptRedis(t *testing.T, p *podded) {
	server := filepath.Join(p.eve.home, "redis-server") // Debian's redis-tools have it under another name
	if err := os.Symlink("/usr/bin/redis-check-rdb", server); err != nil {
		t.Fatal(err)
	}
	r := p.withVolume(t, p.eve, p.kept(), "remote:rw", `
		mkdir /data/redis; begin() { `+server+` --dir /data/redis --port 6399 --appendonly yes --appendfsync always >/dev/null & until [ "$(redis-cli -p 6399 ping 2>&1)" = PONG ]; do kill -0 $!; sleep 0.1; done; }
		begin; for n in $(seq 50); do echo "incr n"; done | redis-cli -p 6399 >/dev/null; redis-cli -p 6399 bgrewriteaof >/dev/null
		redis-cli -p 6399 incr n >/dev/null; kill -9 $!; wait $! || true; begin; redis-cli -p 6399 get n; redis-cli -p 6399 shutdown; wait $!`)
	expect(t, r, "51")
}

// keptSQLite has two programs that lock ranges of a file.
func keptSQLite(t *testing.T, p *podded) {
	r := p.withVolume(t, p.eve, p.kept(), "remote:rw", `
		cd /data; echo "create table t(n);" | sqlite3 base
		add() { for n in $(seq 20); do echo ".timeout 60000
begin immediate; insert into t values(1); commit;"; done | sqlite3 base; }
		add & one=$!; add; wait $one; echo "select count(*) from t; pragma integrity_check;" | sqlite3 base`)
	expect(t, r, "40\nok")
}

// keptReadOnly changes nothing, and sees what the pod changes.
func keptReadOnly(t *testing.T, p *podded) {
	if err := os.WriteFile(filepath.Join(p.disk, "page"), []byte("one\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	asked, changed := filepath.Join(p.eve.home, "asked"), filepath.Join(p.eve.home, "changed")
	answered := make(chan struct{})
	go func() { // another program changes the file after the first look
		defer close(answered)
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if _, err := os.Stat(asked); err != nil {
				continue
			}
			if err := os.WriteFile(filepath.Join(p.disk, "page"), []byte("two, longer\n"), 0o644); err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(changed, nil, 0o644); err != nil {
				t.Error(err)
			}
			return
		}
	}()
	r := p.withVolume(t, p.eve, p.kept(), "remote", `
		cat /data/page /data/down/name; echo; touch /data/page 2>&1 || true; ! mkdir /data/new 2>/dev/null
		touch `+asked+`; until [ -e `+changed+` ]; do sleep 0.02; done; sleep 1; cat /data/page`)
	<-answered
	expect(t, r, "one\npodded\ntouch: cannot touch '/data/page': Read-only file system\ntwo, longer")
}

// keptRestricted works where Pod Security admits only ordinary users without capabilities.
func keptRestricted(t *testing.T, p *podded) {
	r := p.eve.dev(t, p.restricted(), "--isolate", "--volume", "data=remote:rw", "--", "sh", "-euc",
		"echo hello >/data/it; cat /data/it; stat -c %u:%a /data/it")
	expect(t, r, fmt.Sprintf("hello\n%d:644", p.eve.uid))
}

// keptExec works for a user who may exec and not add containers, and leaves no file in the container.
func keptExec(t *testing.T, p *podded) {
	p.apply(t, keptRole)
	dev := p.newUser(t, lab.Developer)
	dev.within = withDevice(0o666)
	testenv.Eventually(t, soon, func() error {
		_, err := p.tryKubectl(t.Context(), "auth", "can-i", "--as", "dev", "create", "pods", "--subresource=exec", "-n", "podded-exec")
		return err
	})
	r := p.withVolume(t, dev, p.shell(), "remote:rw", "echo hello >/data/exec; cat /data/exec")
	expect(t, r, "hello")
	for _, want := range []string{"a program in the container itself", "patch pods/ephemeralcontainers"} {
		if !strings.Contains(r.stderr, want) {
			t.Errorf("%v\nwant %q", r, want)
		}
	}
	left := p.kubectl(t, "-n", "podded-exec", "exec", "deployment/shell", "--", "/bin/sh", "-c", "echo /tmp/.k* /proc/[0-9]*/exe")
	if !strings.Contains(left, "/tmp/.k* ") {
		t.Errorf("left in the container: %s", left)
	}
}

// keptRole has the right to exec, and lacks that to add containers.
const keptRole = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: kept, namespace: podded-exec}
rules:
- {apiGroups: [""], resources: [pods/exec], verbs: [create, get]}
- {apiGroups: [""], resources: [pods, services, configmaps, secrets], verbs: [get, list, watch]}
- {apiGroups: [apps], resources: [deployments], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: kept, namespace: podded-exec}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kept}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: kept-dev, namespace: kubevpn}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubevpn-traffic-manager-user}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
`

// keptNoFUSE checks the error on a machine without /dev/fuse.
func keptNoFUSE(t *testing.T, p *podded) {
	without := *p.eve
	without.within = append(slices.Clone(p.eve.within), "sh", "-euc", `mknod -m 0 /dev/net/none c 10 229; mount --bind /dev/net/none /dev/fuse; exec "$@"`, "sh")
	failure{code: api.ExitPrivilege, message: "/dev/fuse", hint: "kubevpn cp", within: 5 * time.Second}.
		checkProgress(t, p.withVolume(t, &without, p.kept(), "remote", "true"))
}

// keptKilled checks that nothing is left of a program and of its volume after kill -9 of the command, and that the far
// end in the pod ends.
func keptKilled(t *testing.T, p *podded) {
	const program = "tail -f /data/killed"
	before := p.root.snapshot(t)
	began := filepath.Join(p.disk, "killed")
	cmd := p.eve.command(t.Context(), t, "kubevpn", "dev", p.kept().workload, "-n", podNamespace, "--isolate",
		"--volume", "data=remote:rw", "--", "sh", "-euc", "echo hello >/data/killed; exec "+program)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if text, err := os.ReadFile(began); err != nil || string(text) != "hello\n" {
			return fmt.Errorf("%q %w", text, err)
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the signal makes it fail
	testenv.Eventually(t, soon, func() error {
		if r := p.eve.run(t, "pgrep", "-f", program); r.code == 0 {
			return fmt.Errorf("the program is left: %s", r.stdout)
		}
		return nil
	})
	p.root.sameAs(t, before)
}

// podVolumeMoves checks that a volume goes on at another pod when its pod goes.
func podVolumeMoves(t *testing.T, p *podded) {
	s := p.kept()
	first, second := filepath.Join(p.eve.home, "first"), filepath.Join(p.eve.home, "second")
	cmd := p.eve.command(t.Context(), t, "kubevpn", "dev", s.workload, "-n", podNamespace, "--isolate", "--volume",
		"data=remote:rw", "--", "sh", "-euc", "cd /data; echo 1 >before; cat before; touch "+first+
			"; until [ -e "+second+" ]; do sleep 0.1; done; until cat before 2>/dev/null; do sleep 0.1; done; echo 2 >after; cat after")
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		_, err := os.Stat(first)
		return err
	})
	p.kubectl(t, "-n", podNamespace, "delete", "pod", "-l", "app=kept", "--wait=true")
	if err := os.WriteFile(second, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || out.String() != "1\n1\n2\n" {
		t.Errorf("%v: %q", err, out.String())
	}
}

// keptCopy copies files both ways, and goes on after it was stopped.
func keptCopy(t *testing.T, p *podded) {
	from, back := filepath.Join(p.eve.home, "from"), filepath.Join(p.eve.home, "back")
	p.eve.must(t, "sh", "-euc", "mkdir -p "+from+"/d/e; cd "+from+`; for n in $(seq 200); do echo $n >d/f$n; done
		ln -s d/f1 link; chmod 750 d/f2; head -c 3000000 /dev/urandom >big`)
	cp := func(a, b string) result {
		return p.eve.run(t, "kubevpn", "cp", "-n", podNamespace, a, b)
	}
	if r := cp(from, p.kept().workload+":/data/copied"); r.code != 0 {
		t.Fatal(r)
	}
	if r := cp(p.kept().workload+":/data/copied", back); r.code != 0 {
		t.Fatal(r)
	}
	if r := p.eve.run(t, "diff", "-r", "--no-dereference", from, back); r.code != 0 {
		t.Error(r)
	}
	expect(t, p.eve.run(t, "sh", "-euc", "stat -c %a "+back+"/d/f2; readlink "+back+"/link"), "750\nd/f1")
	r := cp(p.kept().workload+":/data/copied", back)
	if r.code != 0 {
		t.Error(r)
	}
}
