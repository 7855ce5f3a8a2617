//go:build e2e && linux

package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// follower is a `kubevpn requests -f -o json`.
type follower struct {
	t       *testing.T
	records chan api.Record
	all     []api.Exchange // seen by wait
	command *exec.Cmd
}

// follow records the requests of the shop's intercept. It returns when that many pods record.
func (l *laptop) follow(t *testing.T, s *shop, pods int, args ...string) *follower {
	t.Helper()
	cmd := l.command(t.Context(), t, append([]string{"kubevpn", "requests", s.workload, "-n", s.namespace, "-f", "-o", "json"}, args...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errout testenv.Buffer
	cmd.Stderr = &errout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f := &follower{t: t, records: make(chan api.Record, 4096), command: cmd}
	go func() {
		defer close(f.records)
		for lines := bufio.NewReader(out); ; {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			var r api.Record
			if err := json.Unmarshal(line, &r); err != nil {
				t.Errorf("%s: %v", line, err)
				return
			}
			f.records <- r
		}
	}()
	select {
	case r, ok := <-f.records:
		if !ok || r.Pods != pods || r.Kind != api.KindRecord {
			t.Fatalf("first record %+v, want %d pods\n%s", r, pods, errout.String())
		}
	case <-time.After(time.Minute):
		t.Fatal("nothing is recorded")
	}
	return f
}

// wait returns the first exchange for which so returns true. It may be an earlier one.
func (f *follower) wait(what string, so func(*api.Exchange) bool) *api.Exchange {
	f.t.Helper()
	timeout := time.After(time.Minute)
	for n := 0; ; n++ {
		for n == len(f.all) {
			select {
			case r, ok := <-f.records:
				if !ok {
					f.t.Fatalf("the command ended before %s; it printed %+v", what, f.all)
				}
				if r.Exchange != nil {
					f.all = append(f.all, *r.Exchange)
				}
			case <-timeout:
				f.t.Fatalf("not recorded: %s; only %+v", what, f.all)
			}
		}
		if so(&f.all[n]) {
			return &f.all[n]
		}
	}
}

// stop ends the command with Ctrl-C.
func (f *follower) stop() {
	f.t.Helper()
	if err := f.command.Process.Signal(os.Interrupt); err != nil {
		f.t.Fatal(err)
	}
	for range f.records {
	}
	if err := f.command.Wait(); err != nil {
		f.t.Errorf("Ctrl-C: %v", err)
	}
}

// proxyRecorded checks that the owner of an intercept sees its requests, of every kind, and no others.
func proxyRecorded(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	if r := l.run(t, "kubevpn", "requests", s.workload, "-n", s.namespace); r.code != int(api.ExitUsage) || !strings.Contains(r.stderr, "-f") {
		t.Errorf("nothing is recorded unless asked for: %v", r)
	}
	pods := s.ready(t)
	f := l.follow(t, s, len(pods), "--body")
	for name, ip := range pods {
		curl := []string{"curl", "-sS", "--max-time", "20", "-H", "Authorization: Bearer secret", "-H", "Cookie: session=secret", "-d", "hello"}
		for _, header := range []string{mine + ": you", mine + ": " + me} {
			if out, err := v.run(t, append(curl, "-H", header, "http://"+ip+":8080/x?pod="+name)...); err != nil {
				t.Fatal(out, err)
			}
		}
		e := f.wait("curl's request", func(e *api.Exchange) bool { return e.Request.Path == "/x?pod="+name })
		if e.Pod != name || e.Request.Method != "POST" || e.Response == nil || e.Response.Status != 200 || e.To != api.ToLaptop || e.Match != mine+"="+me ||
			string(e.Request.Body.Data) != "hello" || !strings.Contains(string(e.Response.Body.Data), `"name":"laptop"`) || e.Seconds <= 0 ||
			!slices.Contains(e.Redacted, "Authorization") || !slices.Contains(e.Redacted, "Cookie") || strings.Contains(fmt.Sprint(e), "secret") {
			t.Errorf("recorded %+v", e)
		}
	}
	for name, ip := range pods {
		v.grpc(t, net.JoinHostPort(ip, "9090"), "laptop", []string{mine, me})
		e := f.wait("gRPC", func(e *api.Exchange) bool { return strings.HasSuffix(e.Request.Path, "/UnaryCall") })
		if e.Pod != name || e.Request.Proto != "HTTP/2.0" || e.Response.Trailers.Get("Grpc-Status") != "0" {
			t.Errorf("recorded %+v", e)
		}
		c := v.webSocket(t, "ws://"+ip+":8080/ws", "laptop", []string{mine, me})
		e = f.wait("WebSocket, while it is open", func(e *api.Exchange) bool { return e.Request.Path == "/ws" })
		if e.Response.Status != http.StatusSwitchingProtocols {
			t.Errorf("recorded %+v", e)
		}
		c.Close()
		break // one pod is enough
	}
	for _, e := range f.all {
		if e.Request.Headers.Get(mine) != me {
			t.Errorf("recorded a request that does not match: %+v", e)
		}
	}
	f.stop()
	if r := l.run(t, "kubevpn", "requests", s.workload, "-n", s.namespace); r.code != int(api.ExitUsage) {
		t.Errorf("something is kept: %v", r)
	}
}

// proxyKept checks what an intercept keeps, also of pods that come later, and its formats.
func proxyKept(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me, "--mirror", "--record", "3")
	defer l.leave(t, s)
	s.kubectl(t, "-n", s.namespace, "rollout", "restart", s.workload)
	s.rolledOut(t)
	testenv.Eventually(t, time.Minute, func() error {
		if i := l.intercept(t); len(i.Pods) != 2 || !i.Pods[0].Intercepted || !i.Pods[1].Intercepted {
			return fmt.Errorf("%+v", i.Pods)
		}
		return nil
	})
	argv := []string{"kubevpn", "requests", s.workload, "-n", s.namespace}
	testenv.Eventually(t, time.Minute, func() error { // an agent records a moment after the pod is intercepted
		for name, ip := range s.ready(t) {
			if a, err := v.ask(http.MethodPut, "http://"+ip+":8080/kept?pod="+name, strings.NewReader("it's"), mine, me); err != nil || a.Name != name {
				t.Errorf("%+v, %v", a, err)
			}
		}
		text := l.must(t, argv...)
		for name := range s.ready(t) {
			if !strings.Contains(text, "/kept?pod="+name) || !strings.Contains(text, "application+copy") {
				return fmt.Errorf("printed\n%s", text)
			}
		}
		if lines := strings.Count(text, "\n"); lines > 3 { // and a head
			return fmt.Errorf("%d are kept:\n%s", lines, text)
		}
		return nil
	})
	var har struct {
		Log struct {
			Entries []struct{ Request struct{ URL string } }
		}
	}
	if err := json.Unmarshal([]byte(l.must(t, append(argv, "-o", "har")...)), &har); err != nil || len(har.Log.Entries) == 0 {
		t.Errorf("%+v, %v", har, err)
	}
}

// first returns one pod.
func first(pods map[string]string) (name, ip string) {
	for name, ip = range pods {
		break
	}
	return name, ip
}

// proxyRepeated checks that the command of -o curl repeats a request.
func proxyRepeated(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	name, ip := first(s.ready(t))
	out := filepath.Join(l.home, "commands")
	cmd := l.command(t.Context(), t, "sh", "-c", l.program+" requests "+s.workload+" -n "+s.namespace+" -f --count 1 -o curl > "+out)
	var errout testenv.Buffer
	cmd.Stderr = &errout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if !strings.Contains(errout.String(), "recording the requests of ") {
			return fmt.Errorf("printed %s", errout.String())
		}
		return nil
	})
	if _, err := v.ask(http.MethodPut, "http://"+ip+":8080/again?a='b'", strings.NewReader("it's\nmine"), mine, me, "X-Quote", `"$(reboot)'`); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err, errout.String())
	}
	f := l.follow(t, s, 2, "--body")
	if r := l.run(t, "sh", out); r.code != 0 || !strings.Contains(r.stdout, `"name":"laptop"`) {
		t.Errorf("%v", r)
	}
	e := f.wait("the request again", func(e *api.Exchange) bool { return true })
	if e.Pod != name || e.Request.Method != "PUT" || e.Request.Path != "/again?a='b'" || string(e.Request.Body.Data) != "it's\nmine" ||
		e.Request.Headers.Get("X-Quote") != `"$(reboot)'` || e.Request.Host != ip+":8080" {
		t.Errorf("recorded %+v", e)
	}
	f.stop()
}
