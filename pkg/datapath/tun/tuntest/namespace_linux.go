package tuntest

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A Namespace is a network namespace of a test's own. Nothing refers to it but its file, so it goes with the test,
// or with the process.
type Namespace struct {
	t    testing.TB
	file *os.File
}

// NewNamespace makes a network namespace whose loopback interface is up. It needs root.
func NewNamespace(t testing.TB) *Namespace {
	t.Helper()
	n := &Namespace{t: t}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
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

// onThread runs f on an operating system thread that nothing else runs on, and that ends with it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked, so that the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

// Do runs f inside the namespace. Sockets that f makes, and programs that it starts, are and stay in it; goroutines
// that f starts are not.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering the network namespace: %w", err)
		}
		return f()
	})
}

// Output runs a program inside the namespace and returns what it prints.
func (n *Namespace) Output(name string, args ...string) (string, error) {
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		return err
	})
	return string(out), err
}

// Run runs a program inside the namespace, and ends the test unless it succeeds.
func (n *Namespace) Run(name string, args ...string) {
	n.t.Helper()
	if out, err := n.Output(name, args...); err != nil {
		n.t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}
