package helper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// roleVariable names what a child process does instead of the tests.
const roleVariable = "KUBEVPN_TEST_ROLE"

func TestMain(m *testing.M) {
	role := func() error { os.Exit(m.Run()); return nil }
	if len(os.Args) == 2 && os.Args[1] == "helper" {
		role = func() error { return Main(context.Background()) }
	} else if os.Getenv(roleVariable) == "daemon" {
		role = daemonRole
	}
	if err := role(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// daemonRole is a small daemon: it starts a helper, configures the network, prints the name of the device, and ends
// with its input, or with the helper.
func daemonRole() error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	socket, err := Start(context.Background(), StartConfig{Executable: exe, Stderr: os.Stderr})
	if err != nil {
		return err
	}
	c, err := NewClient(socket, nil)
	if err != nil {
		return err
	}
	tun, err := c.CreateTUN(context.Background(), "utun", 1500)
	if err != nil {
		return err
	}
	if _, err := c.Apply(context.Background(), api.NetworkState{
		Links: []api.Link{{
			Name: tun.Name(), MTU: 1500, Addrs: []netip.Prefix{netip.MustParsePrefix("198.19.0.1/32")},
			Routes:   []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("198.19.0.0/16")},
			Resolver: netip.MustParseAddr("198.19.255.53"), MatchDomains: []string{"cluster.local"},
		}},
		Resolver: &api.Resolver{Listen4: netip.MustParseAddrPort("127.0.0.1:5399")},
	}); err != nil {
		return err
	}
	fmt.Println(tun.Name())
	input := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		input <- err
	}()
	select {
	case err := <-input:
		return errors.Join(err, c.Close())
	case <-c.Done():
		return tun.Close()
	}
}

func TestHelperLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can change the network")
	}
	for name, end := range map[string]func(t *testing.T, daemon *exec.Cmd, input io.Closer){
		"regular": func(t *testing.T, _ *exec.Cmd, input io.Closer) { input.Close() },
		"daemon_is_killed": func(t *testing.T, daemon *exec.Cmd, _ io.Closer) {
			if err := daemon.Process.Kill(); err != nil {
				t.Error(err)
			}
		},
		"helper_is_killed": func(t *testing.T, _ *exec.Cmd, _ io.Closer) {
			if err := syscall.Kill(helperOf(t), syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := networkState(t)
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			daemon := exec.Command(exe)
			daemon.Env = append(os.Environ(), roleVariable+"=daemon")
			daemon.Stderr = os.Stderr
			input, err := daemon.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			output, err := daemon.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := daemon.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = daemon.Process.Kill() // it has ended, unless the test failed
				_ = daemon.Wait()
			})
			device, err := bufio.NewReader(output).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			during := networkState(t)
			for _, want := range []string{strings.TrimSpace(device), "10.96", "198.19.255.53"} {
				if !strings.Contains(during, want) {
					t.Errorf("the network lacks %s:\n%s", want, during)
				}
			}
			end(t, daemon, input)
			testenv.Until(t, "the network is as before", func() bool { return networkState(t) == before })
		})
	}
}

// helperOf returns the process of this test binary that is a helper.
func helperOf(t *testing.T) int {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(run(t, "ps", "-axo", "pid=,args=")) {
		pid, args, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.Atoi(pid); err == nil && strings.TrimSpace(args) == exe+" helper" {
			return n
		}
	}
	t.Fatal("no helper runs")
	return 0
}

// reach is what macOS finds out about a resolver in its own time.
var reach = regexp.MustCompile(`(?m)^ *(reach|order) .*\n`)

// networkState describes the devices, the routes of this test and the resolvers.
func networkState(t *testing.T) string {
	t.Helper()
	out := run(t, "ifconfig", "-l")
	for line := range strings.Lines(run(t, "netstat", "-rn")) {
		if strings.HasPrefix(line, "10.96") || strings.HasPrefix(line, "198.19") {
			out += line
		}
	}
	return out + reach.ReplaceAllString(run(t, "scutil", "--dns"), "")
}

func run(t *testing.T, command ...string) string {
	t.Helper()
	out, err := exec.Command(command[0], command[1:]...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
