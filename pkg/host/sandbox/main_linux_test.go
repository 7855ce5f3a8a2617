package sandbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
)

// Roles of the test binary when the tests start it again.
const (
	roleInit    = "role-sandbox-init" // Config.Init
	roleParent  = "role-parent"       // runs the sandbox of its argument, a Config as JSON, on its own terminal
	roleServe   = "role-serve"        // a container, which connects to its argument, a socket
	roleProgram = "role-program"      // a container's first process, which connects to its argument, a socket
	roleStage   = "role-stage"        // root, with a /dev/net/tun for everybody; runs its arguments as nobody
)

const (
	nobody      = 65534
	extraGroup  = 4242
	workVar     = "KUBEVPN_SANDBOX_TEST_WORK" // the directory of the tests that run as nobody
	runInParent = "sandbox of the parent runs as "
)

func TestMain(m *testing.M) {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	var err error
	switch role {
	case roleInit:
		err = sandbox.Init()
	case roleParent:
		err = parent(os.Args[2])
	case roleServe:
		err = serveIn(os.Args[2])
	case roleProgram:
		err = serveProgramAt(os.Args[2])
	case roleStage:
		err = stage(os.Args[2:])
	default:
		testenv.AllowHangups()
		// Every init is a copy of this process.
		name, value, _ := strings.Cut(testenv.EndAtOnce(), "=")
		if err = os.Setenv(name, value); err != nil {
			break
		}
		goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
			os.RemoveAll(probePath.dir)
			os.Exit(code)
		}))
	}
	fmt.Fprintln(os.Stderr, role+":", err)
	os.Exit(99)
}

// parent runs a sandbox and exits with the code of its program.
func parent(config string) error {
	var cfg sandbox.Config
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		return err
	}
	cfg.Stdin, cfg.Stdout, cfg.Stderr = os.Stdin, os.Stdout, os.Stderr
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, sandbox.Signals()...)
	s, err := sandbox.New(cfg)
	if err != nil {
		return err
	}
	p, err := s.Start(context.Background())
	if err != nil {
		return err
	}
	if cfg.Network {
		if err := errors.Join(p.SetNetwork(context.Background(), network()), p.Run(context.Background())); err != nil {
			return err
		}
	}
	go func() {
		for s := range signals {
			if err := p.Forward(s); err != nil {
				return // the program has ended
			}
		}
	}()
	fmt.Printf("%s%d\n", runInParent, p.Pid())
	status, err := p.Wait()
	if err != nil {
		return err
	}
	if tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0); err == nil {
		group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
		fmt.Println("terminal is ours:", err == nil && group == unix.Getpgrp())
	}
	os.Exit(status.Code)
	return nil
}

func stage(args []string) error {
	dir := os.Getenv(workVar)
	device := filepath.Join(dir, "dev")
	for _, step := range []func() error{
		func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return os.Mkdir(device, 0o755) },
		func() error { return unix.Mount("tmpfs", device, "tmpfs", 0, "mode=755") },
		func() error { return unix.Mknod(device+"/tun", unix.S_IFCHR, int(unix.Mkdev(10, 200))) },
		func() error { return os.Chmod(device+"/tun", 0o666) },
		func() error { return unix.Mount(device+"/tun", "/dev/net/tun", "", unix.MS_BIND, "") },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: nobody, Gid: nobody, Groups: []uint32{extraGroup}},
		Pdeathsig:  unix.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		return err
	}
	os.Exit(0)
	return nil
}

// TestEverythingWorksAsNobody runs the tests of the package as nobody.
func TestEverythingWorksAsNobody(t *testing.T) {
	testenv.NeedRoot(t)
	work, err := os.MkdirTemp("/tmp", "sandbox-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(work) })
	if err := errors.Join(os.Chmod(work, 0o755), os.Chown(work, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	// A file that only members of the group may read, and a set-user-ID program of root.
	write(t, work+"/group/key", "for the group\n")
	copyOf(t, "/usr/bin/id", work+"/setuid-id")
	if err := errors.Join(os.Chown(work+"/group", 0, extraGroup), os.Chmod(work+"/group", 0o750), os.Chmod(work+"/setuid-id", 0o755|os.ModeSetuid)); err != nil {
		t.Fatal(err)
	}
	self := copyOf(t, "/proc/self/exe", filepath.Join(work, "sandbox.test"))
	const skip = "^(TestEverythingWorksAsNobody|TestContainerGetsVolumesAndRunsPrograms|TestStoreGives.*|Fuzz.*)$"
	left := time.Duration(0) // no limit
	if deadline, ok := t.Deadline(); ok {
		left = max(time.Until(deadline)-10*time.Second, time.Second) // earlier than this process, which prints its output
	}
	args := []string{roleStage, self, "-test.v", "-test.count=1", "-test.timeout=" + left.String(), "-test.skip=" + skip}
	if testing.Short() {
		args = append(args, "-test.short")
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), workVar+"="+work, probeVar+"="+probe(t), "TMPDIR="+work, "HOME="+work, testenv.EndAtOnce())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestIdentityIsTheUsers")) {
		t.Fatalf("as nobody: %v\n%s", err, out)
	}
	t.Logf("as nobody: %d tests and subtests passed, %d skipped", bytes.Count(out, []byte("--- PASS")), bytes.Count(out, []byte("--- SKIP")))
	if testing.Verbose() {
		t.Logf("%s", out)
	}
}

func copyOf(t *testing.T, from, to string) string {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Chmod(0o755), out.Close()); err != nil {
		t.Fatal(err)
	}
	return to
}

const probeVar = "KUBEVPN_SANDBOX_TEST_PROBE"

var probePath struct {
	sync.Once
	dir, path string
	err       error
}

// probe returns the path of the static program of testdata, which every user may run. It is built once, and TestMain
// removes it.
func probe(t *testing.T) string {
	t.Helper()
	if path := os.Getenv(probeVar); path != "" {
		return path
	}
	probePath.Do(func() {
		testenv.NeedPrograms(t, "go")
		dir, err := os.MkdirTemp("/tmp", "sandbox-probe-")
		if err != nil {
			probePath.err = err
			return
		}
		probePath.dir, probePath.path = dir, filepath.Join(dir, "probe")
		if probePath.err = os.Chmod(dir, 0o755); probePath.err != nil {
			return
		}
		build := exec.Command("go", "build", "-o", probePath.path, "./testdata/probe")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			probePath.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if probePath.err != nil {
		t.Fatal(probePath.err)
	}
	return probePath.path
}

// config returns a Config that runs args in /, with the environment that tests need.
func config(args ...string) sandbox.Config {
	return sandbox.Config{
		Init: []string{roleInit},
		Args: args,
		Env:  []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin", "HOME=" + os.Getenv("HOME")},
		Dir:  "/",
	}
}

// running is a Process and its output.
type running struct {
	*sandbox.Process
	t   *testing.T
	out string // a file
}

// start starts a program. If cfg has a network, it is the one of network.
func start(t *testing.T, cfg sandbox.Config) *running {
	t.Helper()
	r := begin(t, cfg)
	if cfg.Network {
		if err := errors.Join(r.SetNetwork(t.Context(), network()), r.Run(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// begin calls Sandbox.Start, and collects the output of the program.
func begin(t *testing.T, cfg sandbox.Config) *running {
	t.Helper()
	out, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cfg.Stdout, cfg.Stderr = out, out
	s, err := sandbox.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Wait() }) // t.Context has ended by then
	return &running{p, t, out.Name()}
}

func (r *running) printed() string {
	b, err := os.ReadFile(r.out)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(b)
}

// await waits until the program has printed something.
func (r *running) await(what string) {
	r.t.Helper()
	testenv.Eventually(r.t, 20*time.Second, func() error {
		if out := r.printed(); !strings.Contains(out, what) {
			return fmt.Errorf("the program has not printed %q, only %q", what, out)
		}
		return nil
	})
}

// run runs a program, which must exit with code 0, and returns its output.
func run(t *testing.T, cfg sandbox.Config) string {
	t.Helper()
	r := start(t, cfg)
	status, err := r.Wait()
	if err != nil || status.Code != 0 {
		t.Fatalf("%q ended with %+v, %v\n%s", cfg.Args, status, err, r.printed())
	}
	return r.printed()
}

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
	return path
}
