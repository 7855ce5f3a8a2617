package subreaper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// asFirst marks a process that acts as a first process. A Family reaps every child, so it must not run in the test
// process, which has others.
const asFirst = "KUBEVPN_TEST_PID1"

func TestMain(m *testing.M) {
	if os.Getenv(asFirst) == "" {
		goleak.VerifyTestMain(m)
		return
	}
	if err := first(); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

// first executes the orders on its standard input, one per line, and prints the results.
func first() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	f := &Family{}
	ctx, cancel := context.WithCancel(context.Background())
	var reaping sync.WaitGroup
	reaping.Go(func() { f.Reap(ctx) })
	defer reaping.Wait()
	defer cancel()
	var last *Process
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch words := strings.Fields(in.Text()); words[0] {
		case "start", "group":
			null, err := os.Open(os.DevNull)
			if err != nil {
				return err
			}
			last, err = f.Start(Program{
				Args: words[1:], Env: []string{"PATH=/nosuch", "PATH=" + os.Getenv("PATH")}, Stdin: null.Fd(), Group: words[0] == "group",
			})
			null.Close()
			fmt.Println("started", err)
		case "wait":
			<-last.Done()
			code, by := last.Exit()
			fmt.Println("ended", code, int(by))
		case "term":
			last.Signal(unix.SIGTERM)
		case "killgroup":
			last.SignalGroup(unix.SIGKILL)
		case "childless": // waits until all children are reaped
			for {
				err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
				if errors.Is(err, unix.ECHILD) {
					break
				}
			}
			fmt.Println("childless")
		}
	}
	return nil
}

// script runs orders in a first process, and returns the output of the process and its children.
func script(t *testing.T, path string, orders ...string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = []string{asFirst + "=1", "PATH=" + path}
	cmd.Stdin = strings.NewReader(strings.Join(orders, "\n") + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

func write(t *testing.T, name string, mode os.FileMode, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func TestFamilyRunsProgramsAndReapsOrphans(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/a/hello", 0o644, "") // may not be executed
	write(t, dir+"/b/hello", 0o755, "#!/bin/sh\necho hello\n")
	write(t, dir+"/b/seven", 0o755, "#!/bin/sh\nexit 7\n")
	write(t, dir+"/b/broken", 0o755, "neither ELF nor a script")
	write(t, dir+"/b/orphans", 0o755, "#!/bin/sh\nfor i in 1 2 3; do (sleep 0.05 &); done\n")
	write(t, dir+"/b/slow", 0o755, "#!/bin/sh\nexec sleep 10\n")
	write(t, dir+"/b/family", 0o755, "#!/bin/sh\nsleep 10 &\nkill -TERM $$\n")
	write(t, dir+"/only/hello", 0o644, "")
	path := dir + "/a:" + dir + "/b:/usr/bin:/bin"
	for _, tt := range []struct {
		name, path string
		orders     []string
		want       string
	}{
		{"found_behind_what_may_not_be_executed", path, []string{"start hello", "wait"}, "started <nil>\nhello\nended 0 0"},
		{"by_its_path", path, []string{"start " + dir + "/b/hello", "wait"}, "started <nil>\nhello\nended 0 0"},
		{"exit_code", path, []string{"start seven", "wait"}, "started <nil>\nended 7 0"},
		{"signal", path, []string{"start slow", "term", "wait"}, "started <nil>\nended 143 15"},
		{"signal_when_it_has_ended", path, []string{"start seven", "wait", "term"}, "started <nil>\nended 7 0"},
		{"one_after_the_other", path, []string{"start seven", "wait", "start hello", "wait"}, "started <nil>\nended 7 0\nstarted <nil>\nhello\nended 0 0"},
		{"orphans", path, []string{"start orphans", "wait", "childless"}, "started <nil>\nended 0 0\nchildless"},
		{"group", path, []string{"group family", "wait", "killgroup", "childless"}, "started <nil>\nended 143 15\nchildless"},
		{"nowhere", path, []string{"start nosuch"}, "started starting nosuch: no such file or directory"},
		{"not_executable", dir + "/only", []string{"start hello"}, "started starting hello: permission denied"},
		{"no_program", path, []string{"start broken"}, "started starting " + dir + "/b/broken: exec format error"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := sorted(script(t, tt.path, tt.orders...), "hello"); got != sorted(tt.want, "hello") {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// sorted moves a line to the front, because the time at which the program writes it varies.
func sorted(text, line string) string {
	rest := strings.ReplaceAll(text+"\n", line+"\n", "")
	return strings.Repeat(line+"\n", strings.Count(text+"\n", line+"\n")) + rest
}

func TestReaderSeesEndOfClosedStandardFiles(t *testing.T) {
	if os.Getenv("KUBEVPN_TEST_CLOSE") != "" {
		if err := CloseStandardFiles(); err != nil {
			os.Exit(2)
		}
		select {} // until it is killed
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestReaderSeesEndOfClosedStandardFiles$")
	cmd.Env = append(os.Environ(), "KUBEVPN_TEST_CLOSE=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, err = io.ReadAll(out)
	if e := cmd.Process.Kill(); err == nil {
		err = e
	}
	if err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Error("it had ended by itself:", err)
	}
}
