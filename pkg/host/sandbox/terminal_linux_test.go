package sandbox_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
)

// parentCommand returns a command that runs a sandbox and exits with the code of its program.
func parentCommand(t *testing.T, cfg sandbox.Config) *exec.Cmd {
	t.Helper()
	b, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", roleParent, string(b))
	cmd.Env = append(os.Environ(), testenv.EndAtOnce())
	return cmd
}

// console is a terminal with the keyboard and screen of a user.
type console struct {
	t      *testing.T
	cmd    *exec.Cmd
	master *os.File
	done   chan struct{}

	mu   sync.Mutex
	text string
}

func onTerminal(t *testing.T, cmd *exec.Cmd) *console {
	t.Helper()
	master, err := pty.StartWithAttrs(cmd, nil, &syscall.SysProcAttr{Setsid: true, Setctty: true})
	if err != nil {
		t.Fatal(err)
	}
	c := &console{t: t, cmd: cmd, master: master, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			c.mu.Lock()
			c.text += string(buf[:n])
			c.mu.Unlock()
			if err != nil {
				return // EIO when no process has the other end open
			}
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		master.Close()
		<-c.done
	})
	return c
}

// parentLine matches the parent's own output, which can come at any moment.
var parentLine = regexp.MustCompile(runInParent + `\d+\n`)

// await waits for a pattern in the output since the last await.
func (c *console) await(pattern string) {
	c.t.Helper()
	re := regexp.MustCompile(pattern)
	err := testenv.Poll(20e9, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.text = parentLine.ReplaceAllString(strings.ReplaceAll(c.text, "\r\n", "\n"), "")
		at := re.FindStringIndex(c.text)
		if at == nil {
			return errors.New("the output is only: " + c.text)
		}
		c.text = c.text[at[1]:]
		return nil
	})
	if err != nil {
		c.t.Fatalf("waiting for %s: %v", pattern, err)
	}
}

func (c *console) enter(keys string) {
	c.t.Helper()
	if _, err := c.master.WriteString(keys); err != nil {
		c.t.Fatal(err)
	}
}

func (c *console) exitCode() int {
	c.t.Helper()
	var exit *exec.ExitError
	if err := c.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		c.t.Fatal(err)
	}
	return c.cmd.ProcessState.ExitCode()
}

func TestCtrlCReachesTheProgramOnly(t *testing.T) {
	c := onTerminal(t, parentCommand(t, sh(`trap 'echo caught; exit 7' INT; tty; echo ready; while :; do sleep 0.02; done`)))
	c.await(`/dev/pts/\d+\n`)
	c.await(`ready\n`)
	c.enter("\x03")
	c.await(`caught\n`)
	c.await(`terminal is ours: true`)
	if code := c.exitCode(); code != 7 {
		t.Errorf("exit code %d", code)
	}

	c = onTerminal(t, parentCommand(t, sh(`echo ready; sleep 100`)))
	c.await(`ready\n`)
	c.enter("\x03")
	if code := c.exitCode(); code != 128+int(unix.SIGINT) {
		t.Errorf("exit code %d", code)
	}
}

// A shell inside does job control. At its end the terminal returns to the parent.
func TestShellInsideControlsJobs(t *testing.T) {
	testenv.NeedPrograms(t, "bash")
	cfg := config("bash", "--norc", "--noprofile", "-i")
	cfg.Env = append(cfg.Env, "PS1=$ ", "TERM=dumb")
	c := onTerminal(t, parentCommand(t, cfg))
	c.await(`\$ `)
	c.enter("echo g''o; cat\n") // at its output, readline has restored the terminal
	c.await(`go\n`)
	c.enter("line\n")
	c.await(`line\nline\n`)
	c.enter("\x1a")
	c.await(`Stopped +.*cat\n`)
	c.enter("fg\n")
	c.await(`fg\n.*cat\n`)
	c.enter("again\n")
	c.await(`again\nagain\n`)
	c.enter("\x03")
	c.await(`\$ `)
	c.enter("exit 5\n")
	c.await(`terminal is ours: true`)
	if code := c.exitCode(); code != 5 {
		t.Errorf("exit code %d", code)
	}
}

// A shell outside stops and continues the parent, init and the program.
func TestShellOutsideStopsAndContinuesAll(t *testing.T) {
	testenv.NeedPrograms(t, "bash")
	b, err := json.Marshal(sh(`trap 'echo hello' CONT; i=0; while :; do i=$((i+1)); echo count $i; sleep 0.02; done`))
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bash", "--norc", "--noprofile", "-i")
	cmd.Env = append(os.Environ(), "PS1=$ ", "TERM=dumb", "EXE="+exe, "CONFIG="+string(b), testenv.EndAtOnce())
	c := onTerminal(t, cmd)
	c.await(`\$ `)
	c.enter("\"$EXE\" " + roleParent + " \"$CONFIG\"\n")
	c.await(`count 3\n`)
	c.enter("\x1a")
	c.await(`Stopped`)
	c.enter("echo it is $((20+3))\n")
	c.await(`it is 23\n`)
	c.mu.Lock()
	c.text = ""
	c.mu.Unlock()
	c.enter("fg\n")
	c.await(`hello\n`)
	c.await(`count \d+\n`)
	c.enter("\x03")
	c.enter("echo code $?\n")
	c.await(`code 130\n`)
	c.enter("exit\n")
	if code := c.exitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
