package tuntest

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace of one test. Only its file refers to it, so it ends with the test or the process.
type Namespace struct {
	t    testing.TB
	file *os.File
}

// NewNamespace creates a network namespace whose loopback interface is up. It requires root.
func NewNamespace(t testing.TB) *Namespace {
	t.Helper()
	n := &Namespace{t: t}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("cannot create a network namespace: %w", err)
		}
		var err error
		n.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.file.Close() })
	n.Run("ip", "link", "set", "lo", "up")
	return n
}

// onThread runs f on an operating system thread of its own, which ends with f.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

// Do runs f inside the namespace. Sockets that f opens and programs that f starts stay in it. Goroutines that f starts
// are outside.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("cannot enter the network namespace: %w", err)
		}
		return f()
	})
}

// Output runs a program inside the namespace and returns its standard output and error.
func (n *Namespace) Output(name string, args ...string) (string, error) {
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		return err
	})
	return string(out), err
}

// Run runs a program inside the namespace, and fails the test at once unless the program succeeds.
func (n *Namespace) Run(name string, args ...string) {
	n.t.Helper()
	if out, err := n.Output(name, args...); err != nil {
		n.t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}
