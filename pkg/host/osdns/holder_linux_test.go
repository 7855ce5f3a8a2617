package osdns

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"kubevpn/internal/testenv"
)

// holderRole acts as the helper: it sets one Config, prints the Applied, and closes at the end of its input.
func holderRole() int {
	var in struct {
		Config  Config
		Options Options
	}
	d := json.NewDecoder(os.Stdin)
	if err := d.Decode(&in); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c := New(in.Options)
	applied, err := c.Set(in.Config)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := json.NewEncoder(os.Stdout).Encode(applied); err != nil {
		return 1
	}
	var wait any
	_ = d.Decode(&wait)
	if err := c.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// holder is a process that runs holderRole.
type holder struct {
	cmd     *exec.Cmd
	applied Applied
	eof     func() error // closes its input
}

// hold starts a holder, in namespaces of its own if any are given.
func hold(t *testing.T, cfg Config, opt Options, namespaces ...uintptr) *holder {
	t.Helper()
	cmd := child("holder")
	for _, flag := range namespaces {
		cmd.SysProcAttr.Cloneflags |= flag
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h := &holder{cmd: cmd, eof: stdin.Close}
	if err := json.NewEncoder(stdin).Encode(map[string]any{"Config": cfg, "Options": struct {
		Table, StateDir, ResolvConf, Bus string
	}{opt.Table, opt.StateDir, opt.ResolvConf, opt.Bus}}); err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(stdout).Decode(&h.applied); err != nil {
		t.Fatal(err)
	}
	return h
}

// upstreamRole is a nameserver in a network namespace of its own, behind the link far0. Every name has the address
// 203.0.113.1, and a TXT record with the network and the address that received the query.
func upstreamRole() int {
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadString('\n') // the link exists when the line with the addresses arrives
	if err != nil {
		return 1
	}
	addrs := strings.Fields(line)
	commands := []string{"ip link set lo up", "ip link set far0 up"}
	for _, a := range addrs {
		switch {
		case strings.Contains(a, ":"):
			commands = append(commands, "ip addr add "+a+"/64 dev far0 nodad")
		case strings.HasPrefix(a, "198.19."):
			commands = append(commands, "ip addr add "+a+"/16 dev far0")
		default:
			commands = append(commands, "ip addr add "+a+"/24 dev far0")
		}
	}
	for _, c := range commands {
		f := strings.Fields(c)
		if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %s\n", c, out)
			return 1
		}
	}
	for _, a := range addrs {
		at := netip.AddrPortFrom(netip.MustParseAddr(a), 53).String()
		if _, err := serveDNS(at, answerAs("upstream "+a, "203.0.113.1")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	fmt.Println("ready")
	_, _ = in.ReadString('\n')
	return 0
}

// startUpstream creates the link eth0, the LAN, with a nameserver at its other end.
func startUpstream(t *testing.T, addrs ...string) {
	t.Helper()
	startNameserver(t, "eth0", addrs, "192.0.2.7/24", "2001:db8::7/64")
}

// startNameserver creates a link with the addresses own, and a nameserver at its other end. The link ends with the
// test.
func startNameserver(t *testing.T, link string, addrs []string, own ...string) {
	t.Helper()
	cmd := child("upstream")
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("upstream: %v", err)
		}
	})
	testenv.Run(t, fmt.Sprintf("ip link add %s type veth peer name far0 netns %d", link, cmd.Process.Pid))
	testenv.Run(t, "ip link set "+link+" addrgenmode none")
	testenv.Run(t, "ip link set "+link+" up")
	for _, a := range own {
		testenv.Run(t, "ip addr add "+a+" dev "+link+map[bool]string{true: " nodad"}[strings.Contains(a, ":")])
	}
	if _, err := fmt.Fprintln(stdin, strings.Join(addrs, " ")); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the nameserver printed %q, %v", line, err)
	}
	testenv.Eventually(t, testTimeout, func() error {
		if got := testenv.Run(t, "ip addr show dev "+link) + testenv.Run(t, "ip route"); !strings.Contains(got, "state UP") || strings.Contains(got, "linkdown") {
			return fmt.Errorf("%s does not come up: %s", link, got)
		}
		return nil
	})
}

// serveDNS serves DNS at one address over UDP and TCP.
func serveDNS(at string, h dns.Handler) (stop func(), err error) {
	var servers []*dns.Server
	stop = func() {
		for _, s := range servers {
			_ = s.Shutdown()
		}
	}
	for _, network := range []string{"udp", "tcp"} {
		var started sync.WaitGroup
		started.Add(1)
		failed := make(chan error, 1)
		s := &dns.Server{Addr: at, Net: network, Handler: h, NotifyStartedFunc: started.Done}
		go func() {
			if err := s.ListenAndServe(); err != nil {
				failed <- fmt.Errorf("%s %s: %w", network, at, err)
				started.Done()
			}
		}()
		started.Wait()
		select {
		case err := <-failed:
			stop()
			return nil, err
		default:
		}
		servers = append(servers, s)
	}
	return stop, nil
}

// answerAs answers every name with one address, and a TXT record of who and the network of the query.
func answerAs(who, addr string) dns.Handler {
	return dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		if q.IsEdns0() != nil {
			m.SetEdns0(1232, false)
		}
		hdr := dns.RR_Header{Name: q.Question[0].Name, Class: dns.ClassINET, Ttl: 1, Rrtype: q.Question[0].Qtype}
		switch q.Question[0].Qtype {
		case dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: hdr, A: netip.MustParseAddr(addr).AsSlice()})
		case dns.TypeTXT:
			m.Answer = append(m.Answer, &dns.TXT{Hdr: hdr, Txt: []string{who + " " + w.LocalAddr().Network()}})
		}
		_ = w.WriteMsg(m)
	})
}
