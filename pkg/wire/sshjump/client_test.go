//go:build unix

package sshjump

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/testenv"
)

// TestMain runs this program as a fake ssh if a client started it.
func TestMain(m *testing.M) {
	if os.Getenv("FAKE_SSH") == "" {
		os.Exit(m.Run())
	}
	if err := fakeSSH(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "noise\n%v\n\n", err)
		os.Exit(255)
	}
}

// fakeSSH is ssh as far as a client needs it. A master, which has no jump host here, ends when its last client does.
func fakeSSH(args []string) error {
	after := func(option string) string { return args[slices.Index(args, option)+1] }
	log, err := os.OpenFile(os.Getenv("FAKE_SSH"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	fmt.Fprintln(log, strings.Join(args, " "))
	switch host := args[len(args)-1]; {
	case slices.Contains(args, "-G"):
		text, err := os.ReadFile(filepath.Join(filepath.Dir(log.Name()), host))
		os.Stdout.Write(text)
		return err
	case slices.Contains(args, "-N") && host == "rejects":
		return errors.New("dev@rejects: Permission denied (publickey).")
	case slices.Contains(args, "-N"):
		master := exec.Command(os.Args[0], "master", after("-S"))
		if err := os.Remove(after("-S")); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		ready, err := master.StdoutPipe()
		if err == nil {
			err = master.Start()
		}
		if err == nil {
			_, err = io.ReadFull(ready, make([]byte, 1))
		}
		return err
	case args[0] == "master":
		l, err := net.Listen("unix", args[1])
		if err != nil {
			return err
		}
		defer l.Close()
		os.Stdout.Write([]byte{1})
		conn, err := l.Accept() // the client's hold
		if err == nil {
			_, err = io.Copy(io.Discard, conn)
		}
		return err
	}
	if _, err := os.Stat(after("-S")); err != nil {
		return err
	}
	conn, err := net.Dial("tcp", after("-W"))
	if err != nil {
		return errors.New("Session open refused by peer")
	}
	go func() { _, _ = io.Copy(conn, os.Stdin); conn.Close() }()
	_, err = io.Copy(os.Stdout, conn)
	return err
}

// newFake returns a client of the fake, and a function that returns the commands that ran since its last call.
func newFake(t *testing.T, hosts string) (*Client, func() []string) {
	t.Helper()
	h, err := Parse(hosts)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "ssh") // names of tests are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(dir, "log")
	c := New(Config{Hosts: h, Program: os.Args[0], Env: append(os.Environ(), "FAKE_SSH="+log, testenv.EndAtOnce()), Dir: dir})
	t.Cleanup(func() {
		c.Release()
		testenv.Eventually(t, time.Minute, func() error {
			_, err := os.Stat(c.config.control())
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return fmt.Errorf("the master runs: %w", err)
		})
		os.RemoveAll(dir)
	})
	seen := 0
	return c, func() []string {
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		all := strings.Split(strings.TrimSpace(string(text)), "\n")
		defer func() { seen = len(all) }()
		return all[seen:]
	}
}

// echoServer returns the address of a server that returns what it receives.
func echoServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); conn.Close() }()
		}
	}()
	return l.Addr().String()
}

func TestConnectionsShareOneMaster(t *testing.T) {
	c, ran := newFake(t, "dev@one,two:2222")
	address := echoServer(t)
	var group errgroup.Group
	for range 4 {
		group.Go(func() error {
			conn, err := c.DialContext(t.Context(), address)
			if err != nil {
				return err
			}
			defer conn.Close()
			if _, err := conn.Write([]byte("hello")); err != nil {
				return err
			}
			_, err = io.ReadFull(conn, make([]byte, 5))
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	masters := 0
	for _, line := range ran() {
		if strings.Contains(line, " -N ") {
			masters++
			if !strings.Contains(line, "BatchMode=yes") || !strings.HasSuffix(line, " -J dev@one -p 2222 -- two") {
				t.Error(line)
			}
		}
	}
	if masters != 1 {
		t.Errorf("%d masters", masters)
	}
}

func TestMasterIsOpenedAgainAfterItsEnd(t *testing.T) {
	c, ran := newFake(t, "one")
	if err := c.Open(t.Context(), io.Discard); err != nil {
		t.Fatal(err)
	}
	if line := ran()[0]; strings.Contains(line, "BatchMode") {
		t.Error(line)
	}
	c.Release() // the fake ends at once
	testenv.Eventually(t, time.Minute, func() error {
		_, err := net.Dial("unix", c.config.control())
		if err == nil {
			return errors.New("the master runs")
		}
		return nil
	})
	conn, err := c.DialContext(t.Context(), echoServer(t))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestRefusedConnectionIsExplained(t *testing.T) {
	c, _ := newFake(t, "one")
	conn, err := c.DialContext(t.Context(), "127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = conn.Read(make([]byte, 1))
	if want := "the jump host one cannot connect to 127.0.0.1:1: Session open refused by peer"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestRejectedLoginIsNotRepeatedWithoutTheUser(t *testing.T) {
	c, ran := newFake(t, "rejects")
	want := "cannot use the jump host rejects: dev@rejects: Permission denied (publickey)."
	for range 3 {
		if _, err := c.DialContext(t.Context(), "127.0.0.1:1"); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if n := len(ran()); n != 1 {
		t.Errorf("%d logins without the user, want 1", n)
	}
	if err := c.Open(t.Context(), io.Discard); err == nil || len(ran()) != 1 {
		t.Errorf("the user's own login did not run, or succeeded: %v", err)
	}
}

func TestMissingProgramIsReported(t *testing.T) {
	c := New(Config{Hosts: Hosts{{Name: "one"}}, Program: "/nonexistent/ssh", Dir: t.TempDir()})
	if err := c.Open(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Error(err)
	}
}

func TestPeerIsTheFirstHost(t *testing.T) {
	for _, tt := range []struct{ hosts, want string }{
		{"plain,other", "192.0.2.1"},
		{"alias", "192.0.2.1"},
		{"command", ""},
		{"loop", "!"},
	} {
		c, _ := newFake(t, tt.hosts)
		for name, text := range map[string]string{
			"plain":   "user dev\nhostname 192.0.2.1\nproxycommand none\n",
			"alias":   "hostname 192.0.2.9\nproxyjump dev@plain:22,other\n",
			"command": "hostname 192.0.2.9\nproxycommand tunnel %h\n",
			"loop":    "hostname 192.0.2.9\nproxyjump loop\n",
		} {
			if err := os.WriteFile(filepath.Join(c.config.Dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got, err := c.Peer(t.Context())
		if got != strings.TrimPrefix(tt.want, "!") || (err != nil) != (tt.want == "!") {
			t.Errorf("%s: %q, %v, want %q", tt.hosts, got, err, tt.want)
		}
	}
}
