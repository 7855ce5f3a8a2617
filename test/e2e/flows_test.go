//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// deafScript sends to an echo server whose answers it does not read, until its standard input ends.
const deafScript = `
import socket, sys, threading
s = socket.create_connection((sys.argv[1], 9001))
def send():
	while True: s.sendall(b"x" * 65536)
threading.Thread(target=send, daemon=True).start()
sys.stdin.read()
`

// flowsSuite checks that `kubevpn flows` shows the programs, names, bytes and stalls of real programs, and `kubevpn dns`
// their queries.
func flowsSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	system := l.connection(t).Netstack == api.NetstackSystem // in a lab that keeps running, kubevpn may choose it
	vip, pod := w.clusterIP(t, "default", "web"), w.pods(t, "default", "app=web")[0].String()

	t.Run("program_bytes_and_service_of_curl", func(t *testing.T) {
		curl := l.background(t, "curl", "-sN", "telnet://"+net.JoinHostPort(vip, "9001"))
		l.eventuallyFlow(t, "curl to the Service", func(f api.Flow) bool {
			return f.Program == "curl" && f.Destination.String() == net.JoinHostPort(vip, "9001") &&
				f.Name == (api.ObjectName{Kind: "service", Namespace: "default", Name: "web"}) && f.PID == curl.Process.Pid &&
				f.Counted && f.Sent > 0 && f.Received >= f.Sent && f.Stall == "" && f.Seconds > 0 &&
				(f.RoundTripTo == api.RoundTripDestination) == system && f.Transport != ""
		}, "hello\n", curl)
	})
	t.Run("name_of_a_pod", func(t *testing.T) {
		curl := l.background(t, "curl", "-sN", "telnet://"+net.JoinHostPort(pod, "9001"))
		l.eventuallyFlow(t, "curl to the pod", func(f api.Flow) bool {
			return f.Program == "curl" && f.Name.Kind == "pod" && f.Name.Namespace == "default" && f.Received > 0
		}, "hello\n", curl)
	})
	t.Run("program_that_does_not_read", func(t *testing.T) {
		deaf := l.background(t, "python3", "-c", deafScript, vip)
		l.eventuallyFlow(t, "the stall", func(f api.Flow) bool {
			return f.Program == "python3" && f.Stall == api.StallProgram && f.StallSeconds > 0
		}, "", deaf)
	})
	t.Run("queries", func(t *testing.T) { queriesAreShown(t, l) })
	if system {
		return // nothing tells the flow of a UDP socket that is closed
	}
	t.Run("datagrams_of_dig", func(t *testing.T) {
		dns := w.clusterIP(t, "kube-system", "kube-dns")
		l.must(t, "dig", "+short", "+time=3", "@"+dns, "web.default.svc.cluster.local")
		l.eventuallyFlow(t, "the query", func(f api.Flow) bool {
			return f.Protocol == "udp" && f.Destination.String() == net.JoinHostPort(dns, "53") &&
				f.Sent > 0 && f.Received > 0 && f.Name.Name == "kube-dns"
		}, "", nil)
	})
}

// program is a program that runs on the laptop until the test ends.
type program struct {
	*exec.Cmd
	write func(string)
}

// background starts a program that ends with its standard input, or is killed after the test.
func (l *laptop) background(t *testing.T, argv ...string) *program {
	t.Helper()
	p := &program{Cmd: l.command(t.Context(), t, argv...)}
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.write = func(text string) {
		if _, err := fmt.Fprint(in, text); err != nil {
			t.Error(err)
		}
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = p.Process.Kill() // it may have ended
		_ = p.Wait()         // killed
	})
	return p
}

// eventuallyFlow waits for a flow in `kubevpn flows -f`, while the program, if there is one, is sent the text.
func (l *laptop) eventuallyFlow(t *testing.T, what string, ok func(api.Flow) bool, text string, p *program) {
	t.Helper()
	cmd := l.command(t.Context(), t, "kubevpn", "flows", "-f", "-o", "json", "--limit", "0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // killed
	}()
	defer time.AfterFunc(time.Minute, func() { out.Close() }).Stop()
	var last api.FlowList
	for lines := json.NewDecoder(out); ; {
		var list api.FlowList
		if err := lines.Decode(&list); err != nil {
			t.Fatalf("%s is not shown: %v\nlast: %+v", what, err, last)
		}
		if slices.ContainsFunc(list.Items, ok) {
			return
		}
		last = list
		if text != "" {
			p.write(text)
		}
	}
}

// queriesAreShown checks that `kubevpn dns` shows who answered, and other names than the cluster's only with --all.
func queriesAreShown(t *testing.T, l *laptop) {
	const name, other = "web.default.svc.cluster.local", "www.outside.test"
	l.must(t, "dig", "+short", "+time=3", "nosuch."+name)
	for range 2 {
		l.must(t, "dig", "+short", "+time=3", name)
	}
	l.must(t, "dig", "+short", "+time=3", other)
	var list api.DNSQueryList
	if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "dns", "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, q := range list.Items {
		found[q.Name+" "+q.From+" "+q.Rcode] = true
		if q.Name == name && (q.Type != "A" || len(q.Answers) != 1 || q.Seconds <= 0 || q.Domain != "cluster.local") {
			t.Errorf("%+v", q)
		}
		if q.Name == other {
			t.Errorf("a private name was recorded: %+v", q)
		}
	}
	if !found[name+" cache NOERROR"] || !found["nosuch."+name+" cluster NXDOMAIN"] {
		t.Errorf("%+v", list)
	}

	follower := l.command(t.Context(), t, "kubevpn", "dns", "-f", "--all", "-o", "json")
	out, err := follower.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := follower.Start(); err != nil {
		t.Fatal(err)
	}
	seen := make(chan bool, 1)
	go func() {
		for lines := json.NewDecoder(out); ; {
			var q api.DNSQuery
			if err := lines.Decode(&q); err != nil || q.Name == other && q.From == "nameserver" && q.Server.IsValid() {
				seen <- err == nil
				return
			}
		}
	}()
	testenv.Eventually(t, time.Minute, func() error {
		l.must(t, "dig", "+short", "+time=3", other)
		select {
		case ok := <-seen:
			if !ok {
				t.Error("the follower ended early")
			}
			return nil
		default:
			return errors.New("--all does not show a name outside of the cluster")
		}
	})
	if err := follower.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := follower.Wait(); err != nil {
		t.Errorf("Ctrl-C: %v", err)
	}
}
