package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/redirect"
)

// What an agent is on a kernel that has no tables with an owner: one with a guardian, and redirects by iptables.
func TestGuardian(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "iptables-nft", "setpriv") {
		return
	}
	t.Setenv(backendVariable, string(redirect.IPTables))
	n := newNetns(t)
	n.serve(":8080")
	n.servePackets(":5353")
	alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
	// begin has an agent that takes both ports for its owner.
	begin := func(t *testing.T, p *process, by *person) *machine {
		t.Helper()
		m := n.connect(by, p.greetings.next(t))
		http := claimOrder("1", "x-user="+by.name)
		udp := &api.ClaimOrder{ID: "udp", Ports: []api.AgentPort{{Protocol: "udp", Port: 5353}}}
		for _, o := range []*api.ClaimOrder{http, udp} {
			if err := m.order(api.AgentOrder{Claim: o}); err != nil {
				t.Fatal(err)
			}
		}
		for _, to := range []string{"10.1.0.2:8080", "[fd00:1::2]:8080"} {
			n.expect(by.name, to, "X-User="+by.name)
		}
		n.expect("application for 10.1.0.2", "10.1.0.2:8080", "X-User=other")
		if got := n.query("10.1.0.2:5353", "news"); got != "news for "+by.name {
			t.Errorf("datagrams: %s", got)
		}
		return m
	}
	// flow asks by a UDP socket of its own, again and again.
	flow := func(t *testing.T) (ask func() string) {
		t.Helper()
		conn, err := n.dial(t.Context(), "udp", "10.1.0.2:5353")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return func() string {
			conn.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.WriteString(conn, "news"); err != nil {
				return err.Error()
			}
			buf := make([]byte, 2048)
			k, err := conn.Read(buf)
			if err != nil {
				return err.Error()
			}
			return string(buf[:k])
		}
	}
	left := func(t *testing.T) {
		t.Helper()
		for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
			if rules := testenv.Run(t, program+" -t nat -S"); strings.Contains(rules, "KUBEVPN") {
				t.Errorf("left in the kernel:\n%s", rules)
			}
		}
	}

	t.Run("agent-killed", func(t *testing.T) {
		p := n.run(alice, "-all,+net_admin")
		m := begin(t, p, alice)
		if s := m.state("the claims", func(s *api.AgentState) bool { return len(s.Claims) == 2 }); !strings.HasPrefix(s.Source, "header: ") {
			t.Errorf("the source is %q", s.Source)
		}
		ask := flow(t)
		if got := ask(); got != "news for alice@laptop" {
			t.Errorf("a flow: %s", got)
		}
		agent := child(t, p.cmd.Process.Pid)
		began := time.Now()
		if err := agent.Kill(); err != nil {
			t.Fatal(err)
		}
		err := p.end(10 * time.Second)
		if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			// beAgent gives 1 for all
			t.Errorf("the guardian ends with %v", err)
		}
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=alice@laptop")
		n.expect("application for fd00:1::9", "[fd00:1::2]:8080", "X-User=alice@laptop")
		if got := ask(); got != "news for the application" {
			t.Errorf("a flow: %s", got)
		}
		took := time.Since(began)
		t.Logf("the application answers %v after the agent was killed", took.Round(time.Millisecond))
		if took > 2*time.Second { // less than a lease
			t.Errorf("it took %v", took)
		}
		if !strings.Contains(p.log.String(), "signal: killed") {
			t.Error("the log does not say how the agent has ended")
		}
		left(t)
	})
	t.Run("both-killed", func(t *testing.T) {
		p := n.run(alice, "-all,+net_admin")
		begin(t, p, alice)
		agent := child(t, p.cmd.Process.Pid)
		began := time.Now()
		if err := p.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		p.end(10 * time.Second)                                                              // "signal: killed"
		testenv.Until(t, "the agent is gone, too", func() bool { return !alive(agent.Pid) }) // as in a container
		n.until(10*time.Second, "application for 10.1.0.9", "10.1.0.2:8080", "X-User=alice@laptop")
		took := time.Since(began)
		t.Logf("the application answers %v after agent and guardian were killed", took.Round(time.Millisecond))
		if took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		if rules := testenv.Run(t, "iptables-nft -t nat -S"); !strings.Contains(rules, "--dport 8080") {
			t.Errorf("something else than the clock has ended the redirects:\n%s", rules)
		}
	})
	t.Run("taken-over", func(t *testing.T) { // what the last one has left, first of all
		first := n.run(alice, "-all,+net_admin")
		begin(t, first, alice)
		second := n.run(bob, "-all,+net_admin")
		second.greetings.next(t) // the first one's
		if err := first.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		first.end(10 * time.Second) // "signal: killed"
		begin(t, second, bob)
		n.expect("application for 10.1.0.2", "10.1.0.2:8080", "X-User=alice@laptop")
		if rules := testenv.Run(t, "iptables-nft -t nat -S PREROUTING"); strings.Count(rules, "KUBEVPN") != 1 {
			t.Errorf("there are redirects of several:\n%s", rules)
		}
		if err := second.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := second.end(10 * time.Second); err != nil {
			t.Errorf("it ends with %v", err)
		}
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=bob@desk")
		left(t)
	})
	t.Run("taken-over-by-a-table", func(t *testing.T) {
		first := n.run(alice, "-all,+net_admin")
		begin(t, first, alice)
		if err := first.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		first.end(10 * time.Second) // "signal: killed"
		t.Setenv(backendVariable, "")
		second := n.run(bob, "-all,+net_admin")
		n.connect(bob, second.greetings.next(t))
		// It asks the kernel as it begins, and removes IPv4's before IPv6's.
		for _, to := range []string{"10.1.0.2:8080", "[fd00:1::2]:8080"} {
			testenv.Until(t, "the application is back", func() bool {
				got, err := n.get(to)
				return err == nil && strings.HasPrefix(got, "application for ")
			})
		}
		left(t)
		if children := childrenOf(t, second.cmd.Process.Pid); len(children) > 0 {
			t.Errorf("it has a guardian: %v", children)
		}
	})
}

// child is the only child of a process.
func child(t *testing.T, parent int) *os.Process {
	t.Helper()
	var agents []int
	testenv.Until(t, "one child", func() bool {
		agents = childrenOf(t, parent)
		return len(agents) == 1
	})
	p, err := os.FindProcess(agents[0])
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func childrenOf(t *testing.T, parent int) (pids []int) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, stat := range stats {
		b, err := os.ReadFile(stat)
		if err != nil { // it has ended meanwhile
			continue
		}
		_, rest, _ := strings.Cut(string(b), ") ") // state, parent
		var state string
		var of int
		if _, err := fmt.Sscan(rest, &state, &of); err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(stat)))
		if err == nil && of == parent {
			pids = append(pids, pid)
		}
	}
	return pids
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// A guardian is how an agent ends for everybody outside: with its exit code, and by the signals that it passes on.
func TestGuardianEnds(t *testing.T) {
	if !testenv.InNamespace(t, "setpriv") {
		return
	}
	t.Setenv(backendVariable, string(redirect.IPTables))
	l, err := net.Listen("unix", api.AgentSocket) // somebody who does not answer: it stands by until it is told to end
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n := newNetns(t)
	for _, s := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		p := n.run(newPerson(t, "alice@laptop"), "-all,+net_admin")
		child(t, p.cmd.Process.Pid)
		testenv.Until(t, "it waits", func() bool { return strings.Contains(p.log.String(), "guarding") })
		if err := p.cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		if err := p.end(10 * time.Second); err != nil {
			t.Errorf("%v: it ends with %v", s, err)
		}
	}
}
