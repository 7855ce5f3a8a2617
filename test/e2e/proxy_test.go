//go:build e2e && linux

package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// The header that marks the developer's own requests.
const mine, me = "x-user", "me"

// proxySuite checks that the selected requests of a workload, and no others, reach the laptop without a restart, and
// that the workload serves itself after any failure.
func proxySuite(t *testing.T, w *world) {
	s := w.newShop(t, "shop", "privileged")
	l := w.newUser(t, lab.Admin)
	l.startApp(t, "laptop")
	v := w.visitor(t)
	before := s.template(t)

	t.Run("matching_requests_reach_the_laptop", func(t *testing.T) { proxyHeaders(t, l, s, v) })
	t.Run("every_kind_of_request_passes", func(t *testing.T) { proxyRequests(t, l, s, v) })
	t.Run("large_uploads_pass_in_bounded_memory", func(t *testing.T) { proxyUploads(t, l, s, v) })
	t.Run("all_traffic_reaches_the_laptop", func(t *testing.T) { proxyEverything(t, l, s, v) })
	t.Run("invalid_intercepts_are_rejected", func(t *testing.T) { proxyRefused(t, l, s) })
	t.Run("parts_of_requests_match", func(t *testing.T) { proxyParts(t, l, s, v) })
	t.Run("two_developers", func(t *testing.T) { proxyTwo(t, l, s, v) })
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
	t.Run("requests_reach_any_listen_address", func(t *testing.T) { proxyListens(t, l, w, v) })
	t.Run("new_pods_are_intercepted", func(t *testing.T) { proxyRollout(t, l, s, v) })
	t.Run("open_connections_stay_or_are_ended", func(t *testing.T) { proxyFlush(t, l, s, v) })
	t.Run("mirror_copies_requests", func(t *testing.T) { proxyMirror(t, l, s, v) })
	t.Run("requests_are_recorded", func(t *testing.T) { proxyRecorded(t, l, s, v) })
	t.Run("requests_are_counted", func(t *testing.T) { proxyMetrics(t, l, s, v) })
	t.Run("requests_are_kept", func(t *testing.T) { proxyKept(t, l, s, v) })
	t.Run("requests_are_repeated", func(t *testing.T) { proxyRepeated(t, l, s, v) })
	t.Run("workload_is_picked_from_a_list", func(t *testing.T) { proxyPicked(t, l, s, v) })
	t.Run("ctrl_c_ends_the_intercept", func(t *testing.T) { proxyForeground(t, l, s, v) })
	t.Run("reset", func(t *testing.T) { proxyReset(t, l, s, v) })
	t.Run("restricted_namespace_gets_a_sidecar", func(t *testing.T) { proxySidecar(t, l, w.newShop(t, "strict-shop", "restricted"), v) })
	before = s.template(t) // a restart has stored its time there
	t.Run("requests_return_to_the_application_after_failures", func(t *testing.T) { proxyDeaths(t, l, s, v) })
	t.Run("unauthorized_clients_learn_nothing", func(t *testing.T) { proxyUnauthorized(t, l, s, v) })
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}

// template returns the pod template of the workload, and its hash.
func (s *shop) template(t *testing.T) string {
	t.Helper()
	return s.kubectl(t, "-n", s.namespace, "get", s.workload, "-o", "jsonpath={.spec.template}")
}

func proxyHeaders(t *testing.T, l *laptop, s *shop, v *visitor) {
	names := s.ready(t)
	from := map[string]string{} // the client address that each pod's application sees
	for name, ip := range names {
		a, err := v.ask(http.MethodGet, "http://"+ip+":8080/", nil)
		if err != nil {
			t.Fatal(err)
		}
		from[name], _, _ = net.SplitHostPort(a.Remote)
	}
	began := time.Now()
	r := l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:http") // one port is given by its name
	l.listed(t, s)
	l.reports(t, s)
	for name, ip := range names {
		if err := v.want("http://"+ip+":8080/", "laptop", mine, me); err != nil {
			t.Errorf("pod %s: %v", name, err)
		}
	}
	t.Logf("each pod answered %v after the command\n%s", time.Since(began).Round(time.Millisecond), r.stderr)
	for name, ip := range names {
		for what, header := range map[string][]string{"none": nil, "another": {mine, "you"}, "more": {mine, me + "x"}} {
			if err := v.want("http://"+ip+":8080/", name, header...); err != nil {
				t.Errorf("pod %s, header %s: %v", name, what, err)
			}
		}
		// The agent decides for each request of one connection.
		regular := s.regular(t)
		for i := range 6 {
			want, header := name, []string(nil)
			if i%2 == 0 {
				want, header = "laptop", []string{mine, me}
			}
			if err := regular.want("http://"+ip+":8080/", want, header...); err != nil {
				t.Errorf("request %d of one connection: %v", i, err)
			}
		}
		if a, err := v.ask(http.MethodGet, "http://"+ip+":8080/", nil); err != nil {
			t.Error(err)
		} else if now, _, _ := net.SplitHostPort(a.Remote); now != from[name] || a.Header.Get("X-Forwarded-For") != "" {
			t.Errorf("the application sees that a request comes from %s, and saw %s before: %+v", now, from[name], a)
		}
	}
	if s.Config().ProxyMode != lab.ProxyNone {
		vip := s.clusterIP(t, s.namespace, "shop")
		if err := errors.Join(v.want("http://"+vip+"/", "laptop", mine, me), v.want("http://"+vip+"/", "a pod")); err != nil {
			t.Errorf("by the ClusterIP: %v", err)
		}
	}
	testenv.Eventually(t, soon, func() error { // the agents count requests
		if n := l.intercept(t).Requests; n < 2 {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
	i := l.intercept(t)
	if i.State != api.InterceptActive || i.Workload != s.workload || i.Namespace != s.namespace || len(i.Pods) != len(names) ||
		i.Mode != api.ModeEphemeral || !strings.Contains(i.Match, me) || i.Owner == "" || i.LastError != "" {
		t.Errorf("%+v", i)
	}
	for _, p := range i.Pods {
		if !p.Intercepted {
			t.Errorf("%+v", p)
		}
	}
	l.leave(t, s)
	for name, ip := range names {
		if err := v.want("http://"+ip+":8080/", name, mine, me); err != nil {
			t.Errorf("after leave, pod %s: %v", name, err)
		}
	}
	if now := l.status(t).Intercepts; len(now) != 0 {
		t.Errorf("%+v", now)
	}
	if now := s.ready(t); fmt.Sprint(now) != fmt.Sprint(names) {
		t.Errorf("the pods were %v and are %v", names, now)
	}
}

// proxyRequests sends each kind of HTTP request, with and without the header.
func proxyRequests(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	for name, ip := range s.ready(t) {
		for want, header := range map[string][]string{"laptop": {mine, me}, name: nil} {
			t.Run("h2c/"+want, func(t *testing.T) {
				tr := &http.Transport{
					DialContext: func(_ context.Context, _, address string) (net.Conn, error) { return dialIn(v.network, address) },
					Protocols:   new(http.Protocols),
				}
				tr.Protocols.SetUnencryptedHTTP2(true)
				defer tr.CloseIdleConnections()
				h2 := &visitor{network: v.network, http: &http.Client{Transport: tr, Timeout: 20 * time.Second}}
				a, err := h2.ask(http.MethodPost, "http://"+ip+":8080/x", strings.NewReader("hello"), header...)
				if err != nil || a.Name != want || a.Proto != "HTTP/2.0" || a.Body.Length != 5 {
					t.Errorf("%+v, %v", a, err)
				}
			})
			t.Run("h2c_by_upgrade/"+want, func(t *testing.T) {
				args := []string{"curl", "-sS", "--http2", "--max-time", "10", "http://" + ip + ":8080/"}
				if header != nil {
					args = append(args, "-H", header[0]+": "+header[1])
				}
				if out, err := v.run(t, args...); err != nil || !strings.Contains(out, `"name":"`+want+`"`) {
					t.Errorf("%s, %v", out, err)
				}
			})
			t.Run("grpc/"+want, func(t *testing.T) { v.grpc(t, net.JoinHostPort(ip, "9090"), want, header) })
			t.Run("websocket/"+want, func(t *testing.T) {
				c := v.webSocket(t, "ws://"+ip+":8080/ws", want, header)
				defer c.Close()
				echoes(t, c, "hello")
			})
			t.Run("events/"+want, func(t *testing.T) {
				get := func(n int) io.ReadCloser {
					req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s:8080/events?n=%d", ip, n), nil)
					if err != nil {
						t.Fatal(err)
					}
					if header != nil {
						req.Header.Set(header[0], header[1])
					}
					resp, err := v.http.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					return resp.Body
				}
				// The server needs a minute for all of these events. The first one arrives long before the last.
				began := time.Now()
				events := get(600)
				defer events.Close()
				first := make([]byte, len("data: "+want+" 0\n\n"))
				_, err := io.ReadFull(events, first)
				if took := time.Since(began); err != nil || string(first) != "data: "+want+" 0\n\n" || took > 30*time.Second {
					t.Errorf("%q, %v after %v", first, err, took)
				}
				few := get(3)
				defer few.Close()
				if all, err := io.ReadAll(few); err != nil || !strings.HasSuffix(string(all), want+" 2\n\n") {
					t.Errorf("%q, %v", all, err)
				}
			})
			t.Run("download_with_a_trailer/"+want, func(t *testing.T) {
				req, err := http.NewRequest(http.MethodGet, "http://"+ip+":8080/download?bytes=50000000", nil)
				if err != nil {
					t.Fatal(err)
				}
				if header != nil {
					req.Header.Set(header[0], header[1])
				}
				resp, err := v.http.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				sum := sha256.New()
				n, err := io.Copy(sum, resp.Body)
				if err != nil || n != 50000000 || resp.Header.Get("X-Name") != want || resp.Trailer.Get("X-Sha256") != hex.EncodeToString(sum.Sum(nil)) {
					t.Errorf("%d bytes from %s, %v, trailer %v", n, resp.Header.Get("X-Name"), err, resp.Trailer)
				}
			})
		}
		// A protocol other than HTTP has no header: the application receives it with little delay.
		t.Run("server_may_speak_first", func(t *testing.T) {
			v.firstLine(t, net.JoinHostPort(ip, "9004"), "220 "+name)
			// The agent has learned this from the first connection. If it had not, every connection would wait for as long
			// as a client may take to speak.
			testenv.Eventually(t, time.Minute, func() error {
				began := time.Now()
				v.firstLine(t, net.JoinHostPort(ip, "9004"), "220 "+name)
				if took := time.Since(began); took > 100*time.Millisecond {
					return fmt.Errorf("a later connection was greeted after %v", took)
				}
				return nil
			})
		})
		t.Run("raw_tcp_reaches_the_application", func(t *testing.T) { v.rawEcho(t, net.JoinHostPort(ip, "9001"), name) })
		break // one pod is enough
	}
}

// proxyUploads checks that a body of any length passes without being buffered.
func proxyUploads(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	for name, ip := range s.ready(t) {
		for want, header := range map[string][]string{"laptop": {mine, me}, name: nil} {
			t.Run(want, func(t *testing.T) {
				const size = 512 << 20 // several times what the agent may hold
				sum := sha256.New()
				body := io.TeeReader(io.LimitReader(pattern{}, size), sum)
				began := time.Now()
				slow := *v.http
				slow.Timeout = 2 * time.Minute
				patient := &visitor{network: v.network, http: &slow}
				a, err := patient.ask(http.MethodPost, "http://"+ip+":8080/upload", io.NopCloser(body), header...)
				if err != nil || a.Name != want || a.Body.Length != size || a.Body.SHA256 != hex.EncodeToString(sum.Sum(nil)) {
					t.Errorf("%+v, %v", a.Body, err)
				}
				t.Logf("%.0f MB/s", size/1e6/time.Since(began).Seconds())
				if agent := s.agentMemory(t, name); agent > 100<<20 {
					t.Errorf("the agent holds %d MiB", agent>>20)
				}
			})
		}
		break // one pod is enough
	}
}

// pattern is a reader of bytes that do not repeat within a buffer's length.
type pattern struct{}

func (pattern) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(i * 7 >> 3)
	}
	return len(p), nil
}

func (v *visitor) grpc(t *testing.T, address, want string, header []string) {
	t.Helper()
	v.grpcBy(t, insecure.NewCredentials(), address, want, header)
}

func (v *visitor) grpcBy(t *testing.T, by credentials.TransportCredentials, address, want string, header []string) {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(by),
		grpc.WithContextDialer(func(_ context.Context, address string) (net.Conn, error) { return dialIn(v.network, address) }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if header != nil {
		ctx = metadata.AppendToOutgoingContext(ctx, header...)
	}
	calls := testgrpc.NewTestServiceClient(conn)
	var trailer metadata.MD
	unary, err := calls.UnaryCall(ctx, &testgrpc.SimpleRequest{}, grpc.Trailer(&trailer))
	if err != nil || unary.GetHostname() != want || len(trailer["x-name"]) != 1 || trailer["x-name"][0] != want {
		t.Errorf("unary: %v, %v, trailer %v", unary, err, trailer)
	}
	stream, err := calls.FullDuplexCall(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		text := strconv.Itoa(i)
		if err := stream.Send(&testgrpc.StreamingOutputCallRequest{Payload: &testgrpc.Payload{Body: []byte(text)}}); err != nil {
			t.Fatal(err)
		}
		out, err := stream.Recv() // receive before sending the next, to use both directions at once
		if err != nil || string(out.GetPayload().GetBody()) != want+": "+text {
			t.Fatalf("stream: %v, %v", out, err)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) || len(stream.Trailer()["x-name"]) != 1 {
		t.Errorf("the stream's end: %v, trailer %v", err, stream.Trailer())
	}
}

// webSocket connects and checks who answers.
func (v *visitor) webSocket(t *testing.T, url, want string, header []string) *websocket.Conn {
	t.Helper()
	d := websocket.Dialer{NetDialContext: func(_ context.Context, _, address string) (net.Conn, error) { return dialIn(v.network, address) }, HandshakeTimeout: 10 * time.Second}
	h := http.Header{}
	if header != nil {
		h.Set(header[0], header[1])
	}
	c, _, err := d.Dial(url, h)
	if err != nil {
		t.Fatal(err)
	}
	_, who, err := c.ReadMessage()
	if err != nil || string(who) != want {
		t.Errorf("%s, %v; want %s", who, err, want)
	}
	return c
}

func echoes(t *testing.T, c *websocket.Conn, text string) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
		t.Fatal(err)
	}
	if _, back, err := c.ReadMessage(); err != nil || string(back) != text {
		t.Fatalf("%q came back, %v", back, err)
	}
}

// firstLine checks what a server sends first, within a second.
func (v *visitor) firstLine(t *testing.T, address, want string) {
	t.Helper()
	c, err := dialIn(v.network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len(want)+1)
	if _, err := io.ReadFull(c, line); err != nil || string(line) != want+"\n" {
		t.Errorf("%q, %v; want %q", line, err, want)
	}
}

func (v *visitor) rawEcho(t *testing.T, address, want string) {
	t.Helper()
	c, err := dialIn(v.network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("\x01\x02\x03")); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if all, err := io.ReadAll(c); err != nil || string(all) != want+"\n\x01\x02\x03" {
		t.Errorf("%q, %v; want it from %s", all, err, want)
	}
}

// datagram sends a datagram from a node and returns the answer.
func (v *visitor) datagram(address, text string) (string, error) {
	var c net.Conn
	err := inside(v.network, func() (err error) {
		c, err = net.Dial("udp", address)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte(text)); err != nil {
		return "", err
	}
	b := make([]byte, 1500)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// proxyEverything checks that, without a header, the laptop receives all TCP and UDP of the ports except kubelet
// probes.
func proxyEverything(t *testing.T, l *laptop, s *shop, v *visitor) {
	names := s.ready(t)
	l.startPostgres(t, "127.0.0.1")
	l.proxy(t, s)
	for name, ip := range names {
		if err := v.want("http://"+ip+":8080/", "laptop"); err != nil {
			t.Errorf("pod %s: %v", name, err)
		}
		if err := v.want("http://"+ip+":8080/", name, "User-Agent", "kube-probe/1.34"); err != nil {
			t.Errorf("a probe: %v", err)
		}
		v.firstLine(t, net.JoinHostPort(ip, "9004"), "220 laptop")
		v.rawEcho(t, net.JoinHostPort(ip, "9001"), "laptop")
		if got, err := v.datagram(net.JoinHostPort(ip, "9001"), "hi"); err != nil || got != "laptop: hi" {
			t.Errorf("by UDP: %q, %v", got, err)
		}
		if err := v.txt(t, ip, "5300", "laptop"); err != nil {
			t.Error(err)
		}
		if out, err := v.run(t, "psql", "-h", ip, "-U", "postgres", "-At", "-c", "select 6*7"); err != nil || strings.TrimSpace(out) != "42" {
			t.Errorf("psql: %q, %v", out, err)
		}
	}
	// The same proxy command again replaces the intercept.
	l.proxy(t, s, "--port", "9999:8080")
	for _, ip := range names {
		if _, err := v.ask(http.MethodGet, "http://"+ip+":8080/", nil); err == nil || !strings.Contains(err.Error(), "502") || !strings.Contains(err.Error(), "refused") {
			t.Errorf("nothing listens on the laptop: %v", err)
		}
	}
	testenv.Eventually(t, soon, func() error {
		if last := l.intercept(t).LastError; !strings.Contains(last, "refused") {
			return fmt.Errorf("the last error is %q", last)
		}
		return nil
	})
	l.leave(t, s)
	for name, ip := range names {
		if err := v.want("http://"+ip+":8080/", name); err != nil {
			t.Error(err)
		}
		v.firstLine(t, net.JoinHostPort(ip, "9004"), "220 "+name)
		if got, err := v.datagram(net.JoinHostPort(ip, "9001"), "hi"); err != nil || got != name+": hi" {
			t.Errorf("by UDP: %q, %v", got, err)
		}
	}
}

// startPostgres runs PostgreSQL on the laptop until the test ends. It trusts all clients.
func (l *laptop) startPostgres(t *testing.T, listen string) {
	t.Helper()
	testenv.NeedPrograms(t, "psql")
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(found) == 0 {
		t.Fatalf("no PostgreSQL in /usr/lib/postgresql: %v", err)
	}
	programs := found[len(found)-1]
	data, err := os.MkdirTemp("", "kubevpn-e2e-postgres-") // the user of PostgreSQL cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	as := []string{"setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--"}
	if out, err := exec.Command("chown", "postgres:postgres", data).CombinedOutput(); err != nil {
		t.Fatalf("chown: %v: %s", err, out)
	}
	if r := l.run(t, append(as, programs+"/initdb", "--auth=trust", "--no-sync", "-D", data+"/db")...); r.code != 0 {
		t.Fatal(r)
	}
	if err := os.WriteFile(data+"/db/pg_hba.conf", []byte("host all all all trust\n"), 0); err != nil { // it exists
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd := l.command(ctx, t, append(as, programs+"/postgres", "-D", data+"/db", "-k", "",
		"-c", "listen_addresses="+listen, "-c", "fsync=off")...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // which also ends its child processes
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); cmd.Wait() })
	testenv.Eventually(t, time.Minute, func() error {
		if r := l.run(t, "psql", "-h", "127.0.0.1", "-U", "postgres", "-c", "select 1"); r.code != 0 {
			return errors.New(r.String())
		}
		return nil
	})
}

func proxyRefused(t *testing.T, l *laptop, s *shop) {
	for _, tt := range []struct {
		name string
		args []string
		failure
	}{
		{"no_such_workload", []string{"deployment/nobody", "-n", s.namespace}, failure{code: api.ExitWorkload, message: "nobody", hint: "kubectl"}},
		{"no_such_port_name", []string{s.workload, "-n", s.namespace, "--port", "7777:nothing"}, failure{code: api.ExitWorkload, message: "nothing", hint: "http"}},
		{"no_such_container", []string{s.workload, "-n", s.namespace, "-c", "web"}, failure{code: api.ExitWorkload, message: "web", hint: "app"}},
		{"a_header_without_value", []string{s.workload, "--headers", "x"}, failure{code: api.ExitUsage, message: "x", hint: "="}},
		{"a_regular_expression_that_is_none", []string{s.workload, "--headers", "x=~("}, failure{code: api.ExitUsage, message: "x"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.check(t, l.run(t, append([]string{"kubevpn", "proxy"}, tt.args...)...))
			if now := l.status(t).Intercepts; len(now) != 0 {
				t.Errorf("%+v", now)
			}
		})
	}
}

// proxyTwo checks that two developers with disjoint matches share a workload, and that an overlap names its owner.
func proxyTwo(t *testing.T, l *laptop, s *shop, v *visitor) {
	other := s.secondLaptop(t)
	l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:8080")
	other.proxy(t, s, "--headers", mine+"=you", "--port", "8081:8080")
	wants := func(t *testing.T, his string) {
		t.Helper()
		if err := s.everyPod(t, func(ip string) error {
			if err := v.want("http://"+ip+":8080/", "laptop", mine, me); err != nil {
				return err
			}
			_, err := v.ask(http.MethodGet, "http://"+ip+":8080/", nil, mine, "you")
			if his == "a pod" && err != nil || his != "a pod" && (err == nil || !strings.Contains(err.Error(), his)) {
				return fmt.Errorf("the other's: %w", err)
			}
			return v.want("http://"+ip+":8080/", "a pod")
		}); err != nil {
			t.Error(err)
		}
	}
	wants(t, "502") // nothing listens on port 8081 of the other laptop, so the request reached it
	other.leave(t, s)
	failure{code: api.ExitConflict, message: l.intercept(t).Owner, hint: "header"}.
		check(t, other.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine+"=~m.*"))
	failure{code: api.ExitConflict, message: "since", hint: "header"}.
		check(t, other.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace))
	if now := other.status(t).Intercepts; len(now) != 0 {
		t.Errorf("%+v", now)
	}
	wants(t, "a pod")
	other.proxy(t, s, "--headers", mine+"=you", "--port", "8081:8080")
	wants(t, "502")
	testenv.Eventually(t, soon, func() error { // the agents report it later
		if others := l.intercept(t).Others; len(others) != 1 || !strings.Contains(others[0].Match, "you") {
			return fmt.Errorf("status of the first laptop does not list the other intercept: %+v", others)
		}
		return nil
	})
	other.leave(t, s)
	wants(t, "a pod")
	// Expressions may be provably of different requests. Those for any place in a header are not.
	l.proxy(t, s, "--headers", "baggage=~session=x.*", "--port", "8080:8080")
	other.proxy(t, s, "--headers", "baggage=~session=y.*", "--port", "8081:8080")
	r := other.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", "baggage=~.*session=y.*")
	failure{code: api.ExitConflict, message: "session=x", hint: "--baggage"}.check(t, r)
	if !strings.Contains(r.stderr, "with its former settings has ended") {
		t.Error(r)
	}
	l.leave(t, s)
}

// proxyParts selects requests by what curl and gRPC put into one part of them, and looks at what a browser may keep.
func proxyParts(t *testing.T, l *laptop, s *shop, v *visitor) {
	defer l.leave(t, s)
	for _, tt := range []struct {
		match  []string
		fits   []string   // arguments of curl
		others [][]string // that do not fit
	}{
		{[]string{"--baggage", "session=x y"}, []string{"-H", "baggage: team=a, session=x%20y;ttl=3"}, [][]string{{"-H", "baggage: session=x%20yz"}, {"-H", "baggage: a=b;session=x%20y"}}},
		{[]string{"--cookie", "user=me"}, []string{"-b", "a=b; user=me"}, [][]string{{"-b", "user=me2; xuser=me"}}},
		{[]string{"--query", "user=a&b"}, []string{"-G", "-d", "x=y", "--data-urlencode", "user=a&b"}, [][]string{{"-G", "-d", "user=a"}}},
		{[]string{"--headers", "baggage=~session=x.*"}, []string{"-H", "baggage: session=x"}, [][]string{{"-H", "baggage: a=b,session=x"}}},
	} {
		l.proxy(t, s, append(tt.match, "--port", "8080:8080")...)
		if err := s.everyPod(t, func(ip string) error {
			for n, args := range append([][]string{tt.fits, nil}, tt.others...) {
				out, err := v.run(t, append([]string{"curl", "-sS", "-D", "-", "--max-time", "10", "http://" + ip + ":8080/"}, args...)...)
				reached, kept := strings.Contains(out, `"name":"laptop"`), !strings.Contains(out, "Cache-Control: no-store")
				if err != nil || reached != (n == 0) || kept != (n > 0) {
					return fmt.Errorf("%q: %w\n%s", args, err, out)
				}
			}
			return nil
		}); err != nil {
			t.Errorf("%q: %v", tt.match, err)
		}
	}
	l.proxy(t, s, "--grpc-method", "grpc.testing.TestService", "--port", "9090:9090")
	if err := s.everyPod(t, func(ip string) error {
		v.grpc(t, net.JoinHostPort(ip, "9090"), "laptop", nil)
		return v.want("http://"+ip+":8080/", "a pod")
	}); err != nil {
		t.Error(err)
	}
	l.proxy(t, s, "--cache", "--headers", mine+"="+me, "--port", "8080:8080")
	if err := s.everyPod(t, func(ip string) error {
		out, err := v.run(t, "curl", "-sS", "-D", "-", "--max-time", "10", "-H", mine+": "+me, "http://"+ip+":8080/")
		if err != nil || !strings.Contains(out, `"name":"laptop"`) || strings.Contains(out, "no-store") {
			return fmt.Errorf("with --cache: %w\n%s", err, out)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// proxyRollout checks that new pods of a rollout or a scale-out are intercepted within two seconds of being ready, and
// that a change by a CI system stays.
func proxyRollout(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:8080")
	intercepted := func(t *testing.T) { t.Helper(); s.taken(t, v, soon) }
	t.Run("rollout", func(t *testing.T) { s.restart(t); intercepted(t) })
	t.Run("scale_to_10", func(t *testing.T) {
		s.kubectl(t, "-n", s.namespace, "scale", s.workload, "--replicas=10")
		defer s.kubectl(t, "-n", s.namespace, "scale", s.workload, "--replicas=2")
		s.rolledOut(t)
		intercepted(t)
		if n := len(s.ready(t)); n != 10 {
			t.Errorf("%d pods are ready", n)
		}
	})
	t.Run("node_drained", func(t *testing.T) {
		node := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app=shop", "-o", "jsonpath={.items[0].spec.nodeName}")
		defer s.kubectl(t, "uncordon", node)
		s.kubectl(t, "drain", node, "--pod-selector=app=shop", "--delete-emptydir-data", "--timeout=120s")
		s.rolledOut(t)
		intercepted(t)
	})
	t.Run("image_change_by_ci_stays", func(t *testing.T) {
		const next = appRef + "-next"
		for _, node := range s.nodes() {
			s.node(t, node, "ctr -n k8s.io images tag --force %s %s", appRef, next)
		}
		s.kubectl(t, "-n", s.namespace, "set", "image", s.workload, "app="+next)
		s.rolledOut(t)
		intercepted(t)
		release := s.template(t)
		l.leave(t, s)
		if after := s.template(t); after != release || !strings.Contains(after, next) {
			t.Errorf("CI's template\n%s\nis\n%s", release, after)
		}
		s.kubectl(t, "-n", s.namespace, "set", "image", s.workload, "app="+appRef)
		s.rolledOut(t)
	})
}

// proxyListens checks that other requests reach the application at any listen address, including only localhost.
func proxyListens(t *testing.T, l *laptop, w *world, v *visitor) {
	var manifest strings.Builder
	manifest.WriteString("apiVersion: v1\nkind: Namespace\nmetadata: {name: listens}\n")
	for name, host := range map[string]string{"everywhere": "0.0.0.0", "pod-ip": "$(POD_IP)", "localhost": "127.0.0.1"} {
		manifest.WriteString(strings.NewReplacer("NAME", name, "ADDRESS", host, "APP_IMAGE", appRef).Replace(`
---
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: listens, labels: {app: shop}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: app
    image: APP_IMAGE
    imagePullPolicy: Never
    env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: LISTEN_HOST, value: ADDRESS}]
    ports: [{containerPort: 8080}, {containerPort: 9004}]
`))
	}
	w.apply(t, manifest.String())
	w.kubectl(t, "-n", "listens", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
	s := &shop{world: w, namespace: "listens"}
	for name, ip := range s.ready(t) {
		t.Run(name, func(t *testing.T) {
			s := &shop{world: w, namespace: "listens", workload: "pod/" + name}
			l.proxy(t, s, "--headers", mine+"="+me)
			defer l.leave(t, s)
			url := "http://" + ip + ":8080/"
			if err := v.want(url, "laptop", mine, me); err != nil {
				t.Error(err)
			}
			testenv.Eventually(t, soon, func() error { return v.want(url, name) }) // it may still be starting
			v.firstLine(t, net.JoinHostPort(ip, "9004"), "220 "+name)
		})
	}
}

// proxyFlush checks that existing connections stay with the application, unless the user asks to end them.
func proxyFlush(t *testing.T, l *laptop, s *shop, v *visitor) {
	for name, ip := range s.ready(t) {
		c, err := dialIn(v.network, net.JoinHostPort(ip, "9001"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		echo := func(text string) error {
			if err := c.SetDeadline(time.Now().Add(soon)); err != nil {
				return err
			}
			if _, err := c.Write([]byte(text)); err != nil {
				return err
			}
			_, err := io.ReadFull(c, make([]byte, len(text)))
			return err
		}
		if err := echo(strings.Repeat("x", len(name)+1)); err != nil { // the name and a newline
			t.Fatal(err)
		}
		l.proxy(t, s)
		if err := echo("still here"); err != nil {
			t.Errorf("a connection from before: %v", err)
		}
		l.leave(t, s)
		if err := echo("still here"); err != nil {
			t.Errorf("a connection from before: %v", err)
		}
		l.proxy(t, s, "--flush")
		if err := echo("still here"); err == nil {
			t.Error("a connection from before was not ended")
		}
		v.rawEcho(t, net.JoinHostPort(ip, "9001"), "laptop")
		l.leave(t, s)
		break
	}
}

// proxyMirror checks that the application answers while the laptop receives a copy.
func proxyMirror(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me, "--mirror")
	for name, ip := range s.ready(t) {
		if a, err := v.ask(http.MethodPost, "http://"+ip+":8080/", strings.NewReader("twice"), mine, me); err != nil || a.Name != name || a.Body.Length != 5 {
			t.Errorf("%+v, %v", a, err)
		}
	}
	testenv.Eventually(t, soon, func() error {
		if i := l.intercept(t); i.Requests < 2 || !i.Mirror {
			return fmt.Errorf("%+v", i)
		}
		return nil
	})
	l.leave(t, s)
}

// proxyForeground checks that Ctrl-C ends the intercept.
// proxyPicked names a part of the workload in the list that a terminal shows.
func proxyPicked(t *testing.T, l *laptop, s *shop, v *visitor) {
	x := l.terminal(t, "kubevpn", "proxy", "-n", s.namespace, "--headers", mine+"="+me)
	x.shows(t, "Esc to cancel")
	x.types(t, "/SHO\r")
	if code := x.ends(t); code != 0 {
		t.Fatalf("exit code %d: %q", code, x.text())
	}
	x.shows(t, fmt.Sprintf("running `kubevpn proxy %s -n %s --headers %s=%s`", s.workload, s.namespace, mine, me))
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "laptop", mine, me) }); err != nil {
		t.Error(err)
	}
	l.leave(t, s)
}

func proxyForeground(t *testing.T, l *laptop, s *shop, v *visitor) {
	cmd := l.command(t.Context(), t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--foreground")
	var out testenv.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if !strings.Contains(out.String(), "Ctrl-C ends the intercept.") { // pods answer a moment before
			return fmt.Errorf("still beginning:\n%s", out.String())
		}
		return nil
	})
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "laptop", mine, me) }); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("Ctrl-C: %v\n%s", err, out.String())
	}
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "a pod", mine, me) }); err != nil {
		t.Error(err)
	}
	if now := l.status(t); len(now.Intercepts) != 0 || len(now.Connections) != 1 {
		t.Errorf("%+v", now)
	}
}

// proxyReset checks that an admin without a connection can remove the intercepts of others, who are told.
func proxyReset(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me)
	admin := s.secondLaptop(t)
	if r := admin.run(t, "kubevpn", "reset", s.workload, "-n", s.namespace); r.code != 0 || !strings.Contains(r.stdout+r.stderr, me) {
		t.Errorf("%v", r)
	}
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "a pod", mine, me) }); err != nil {
		t.Error(err)
	}
	testenv.Eventually(t, soon, func() error {
		if i := l.intercept(t); i.State != api.InterceptFailed || i.Error == nil {
			return fmt.Errorf("%+v", i)
		}
		return nil
	})
	owner := l.intercept(t).Owner
	l.leave(t, s)
	s.recorded(t, owner, "InterceptBegan", "InterceptEnded", "Reset")
	l.proxy(t, s, "--headers", mine+"="+me)
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "laptop", mine, me) }); err != nil {
		t.Error(err)
	}
	l.leave(t, s)
}

// proxySidecar checks that the template gains an agent without capabilities, and loses it again, where pod security
// does not admit an ephemeral container with a capability.
func proxySidecar(t *testing.T, l *laptop, s *shop, v *visitor) {
	before := s.template(t)
	service := s.kubectl(t, "-n", s.namespace, "get", "service", "shop", "-o", "jsonpath={.spec}")
	l.proxy(t, s, "--headers", mine+"="+me)
	if i := l.intercept(t); i.Mode != api.ModeSidecar || !strings.Contains(i.ModeReason, "PodSecurity") {
		t.Errorf("mode %s, because %s", i.Mode, i.ModeReason)
	}
	url := "http://shop." + s.namespace + "/"
	if s.Config().ProxyMode != lab.ProxyNone {
		url = "http://" + s.clusterIP(t, s.namespace, "shop") + "/"
		// kube-proxy learns of the new pods later.
		testenv.Eventually(t, soon, func() error {
			return errors.Join(v.want(url, "laptop", mine, me), v.want(url, "a pod"))
		})
	} else if out := l.must(t, "curl", "-sS", "--max-time", "5", "-H", mine+": "+me, url); !strings.Contains(out, `"name":"laptop"`) {
		t.Errorf("%s", out)
	}
	l.leave(t, s)
	s.rolledOut(t)
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
	if after := s.kubectl(t, "-n", s.namespace, "get", "service", "shop", "-o", "jsonpath={.spec}"); after != service {
		t.Errorf("the Service was\n%s\nand is\n%s", service, after)
	}
	testenv.Eventually(t, soon, func() error { // a pod of the old template may still be an endpoint
		r := l.run(t, "curl", "-sS", "--max-time", "5", "-H", mine+": "+me, "http://shop."+s.namespace+"/")
		if r.code != 0 || !strings.Contains(r.stdout, `"name":"shop-`) {
			return fmt.Errorf("after leave: %v", r)
		}
		return nil
	})
}

// agents returns the processes of the traffic agents in a pod.
func (s *shop) agents(t *testing.T, pod string) []int {
	t.Helper()
	uid := s.kubectl(t, "-n", s.namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		argv, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		cgroup, _ := os.ReadFile("/proc/" + e.Name() + "/cgroup")
		if strings.HasPrefix(string(argv), "/traffic\x00agent") && (strings.Contains(string(cgroup), uid) || strings.Contains(string(cgroup), strings.ReplaceAll(uid, "-", "_"))) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (s *shop) agentMemory(t *testing.T, pod string) (bytes int) {
	t.Helper()
	for _, pid := range s.agents(t, pod) {
		bytes += resident(t, pid)
	}
	return bytes
}

// restart starts a rollout of the workload.
func (s *shop) restart(t *testing.T) {
	t.Helper()
	s.kubectl(t, "-n", s.namespace, "rollout", "restart", s.workload)
	s.rolledOut(t)
}

// served waits until the application of each pod answers the requests with the header.
func (s *shop) served(t *testing.T, v *visitor, within time.Duration) {
	t.Helper()
	began := time.Now()
	testenv.Eventually(t, within, func() error {
		return s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "a pod", mine, me) })
	})
	t.Logf("the application answered after %v", time.Since(began).Round(time.Millisecond))
}

// taken waits until the laptop answers for each pod.
func (s *shop) taken(t *testing.T, v *visitor, within time.Duration) {
	t.Helper()
	began := time.Now()
	testenv.Eventually(t, within, func() error {
		return s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "laptop", mine, me) })
	})
	t.Logf("the laptop answered after %v", time.Since(began).Round(time.Millisecond))
}

// killAgents kills the agents of all pods. The applications get their ports back at once, and new agents start.
func (s *shop) killAgents(t *testing.T, v *visitor) {
	t.Helper()
	for name, ip := range s.ready(t) {
		pids := s.agents(t, name)
		if len(pids) == 0 {
			t.Fatalf("pod %s has no agent", name)
		}
		for _, pid := range pids {
			kill(t, pid)
		}
		// The killed process may still be running on a processor.
		testenv.Eventually(t, soon, func() error {
			return v.want("http://"+ip+":8080/", name)
		})
	}
	s.taken(t, v, soon)
}

// proxyDeaths checks that requests reach the application after each failure: at once when the agent ends, within five
// seconds when the laptop ends.
func proxyDeaths(t *testing.T, l *laptop, s *shop, v *visitor) {
	served := func(t *testing.T, within time.Duration) { t.Helper(); s.served(t, v, within) }
	taken := func(t *testing.T, within time.Duration) { t.Helper(); s.taken(t, v, within) }
	l.proxy(t, s, "--headers", mine+"="+me)
	t.Run("agent_is_replaced_after_kill", func(t *testing.T) { s.killAgents(t, v) })
	t.Run("websocket_survives_a_reconnect", func(t *testing.T) {
		for _, ip := range s.ready(t) {
			c := v.webSocket(t, "ws://"+ip+":8080/ws", "laptop", []string{mine, me})
			defer c.Close()
			echoes(t, c, "before")
			if err := s.Restart(t.Context(), "kube-apiserver"); err != nil {
				t.Fatal(err)
			}
			l.connectedAgain(t, 40*time.Second)
			echoes(t, c, "after")
			break
		}
		taken(t, soon)
	})
	t.Run("application_answers_while_laptop_sleeps", func(t *testing.T) {
		pid := l.daemonPID(t)
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer syscall.Kill(pid, syscall.SIGCONT)
		served(t, soon)
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		taken(t, soon)
	})
	t.Run("port_forward_replaces_the_manager", func(t *testing.T) {
		c := l.connection(t)
		replicas := func(n string) {
			s.kubectl(t, "-n", c.ManagerNamespace, "scale", "deployment/kubevpn-traffic-manager", "--replicas="+n)
		}
		replicas("0")
		back := sync.OnceFunc(func() { replicas("1") })
		defer back()
		s.kubectl(t, "-n", c.ManagerNamespace, "delete", "pod", c.ManagerPod, "--grace-period=0", "--force", "--ignore-not-found")
		// A port-forward to the pods still exists, so either the laptop or the application answers.
		testenv.Eventually(t, soon, func() error {
			return s.everyPod(t, func(ip string) error {
				_, err := v.ask(http.MethodGet, "http://"+ip+":8080/", nil, mine, me)
				return err
			})
		})
		back()
		taken(t, 60*time.Second)
	})
	t.Run("application_answers_after_laptop_is_killed", func(t *testing.T) {
		kill(t, l.daemonPID(t))
		served(t, soon)
		// A laptop that returns starts a new intercept.
		l.proxy(t, s, "--headers", mine+"="+me)
		taken(t, soon)
		l.leave(t, s)
	})
}

// proxyUnauthorized checks that a pod gets no data from the ports of the agent and the traffic manager, and cannot
// inject any, although it knows everything that `get pods` and the agent's log show.
func proxyUnauthorized(t *testing.T, l *laptop, s *shop, v *visitor) {
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	pod := &visitor{network: fmt.Sprintf("/proc/%d/ns/net", s.podProcess(t, "default", "app=web"))}
	before := l.intercept(t).Requests
	addresses := map[string]string{} // maps each address to its owner
	for name, ip := range s.ready(t) {
		for _, port := range s.agentPorts(t, name) {
			addresses[net.JoinHostPort(ip, strconv.Itoa(port))] = "the agent of " + name
		}
	}
	if len(addresses) < len(s.ready(t)) {
		t.Fatalf("agents listen at %v", addresses)
	}
	c := l.connection(t)
	manager := s.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.status.podIP}")
	addresses[net.JoinHostPort(manager, strconv.Itoa(api.ProxyPort))] = "the traffic manager"
	var mu sync.Mutex
	reached := map[string]bool{}
	t.Run("ports", func(t *testing.T) { // in parallel, because some wait for a handshake that never comes
		sendUnauthorized(t, pod, addresses, func(owner string) {
			mu.Lock()
			defer mu.Unlock()
			reached[owner] = true
		})
	})
	for _, owner := range addresses {
		if !reached[owner] {
			t.Errorf("no connection reached %s", owner)
		}
	}
	if now := l.intercept(t); now.Requests != before || now.LastError != "" {
		t.Errorf("%d requests came before, %d now; %q", before, now.Requests, now.LastError)
	}
	for name, ip := range s.ready(t) {
		if err := errors.Join(v.want("http://"+ip+":8080/", "laptop", mine, me), v.want("http://"+ip+":8080/", name)); err != nil {
			t.Error(err)
		}
	}
	// Pods and logs are readable by others and must not contain credentials.
	for name := range s.ready(t) {
		env := s.kubectl(t, "-n", s.namespace, "get", "pod", name, "-o",
			`jsonpath={range .spec.ephemeralContainers[*].env[*]}{.name}={.value}{"\n"}{end}`)
		for line := range strings.Lines(env) {
			variable, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			switch raw, err := base64.RawURLEncoding.DecodeString(value); {
			case variable == api.AgentNameVariable && strings.Contains(value, "@"):
			case variable == api.AgentOwnerVariable && err == nil && len(raw) == sha256.Size: // the hash of a public key
			case variable == api.AgentInfoPortVariable && len(value) == 5: // a port
			case value == "": // the address, from the pod's status
			default:
				t.Errorf("the agent in %s has the variable %s", name, line)
			}
		}
		text := s.kubectl(t, "-n", s.namespace, "get", "pod", name, "-o", "yaml")
		for container := range strings.FieldsSeq(s.kubectl(t, "-n", s.namespace, "get", "pod", name, "-o", "jsonpath={.spec.ephemeralContainers[*].name}")) {
			text += s.kubectl(t, "-n", s.namespace, "logs", name, "-c", container)
		}
		if strings.Contains(text, "PRIVATE KEY") || strings.Contains(text, "Bearer ") {
			t.Errorf("pod %s shows a key:\n%s", name, text)
		}
	}
}

// sendUnauthorized sends data to the addresses that their owners would not send.
func sendUnauthorized(t *testing.T, from *visitor, addresses map[string]string, reached func(owner string)) {
	for address, owner := range addresses {
		name := strings.ReplaceAll(owner, " ", "_")
		for kind, request := range map[string]string{"nothing": "", "http": "GET / HTTP/1.1\r\nHost: x\r\n" + mine + ": " + me + "\r\n\r\n", "a_tls_hello": "\x16\x03\x01\x00\x05hello"} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				c, err := dialIn(from.network, address)
				if err != nil {
					return // the port accepts only this pod's own network
				}
				defer c.Close()
				reached(owner)
				if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write([]byte(request)); err != nil {
					t.Fatal(err)
				}
				// The only permitted answer is a TLS alert.
				if b, err := io.ReadAll(c); len(b) > 0 && !strings.HasPrefix(string(b), "\x15\x03") || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%s said %q, %v", address, b, err)
				}
			})
		}
		t.Run(name+"/unknown_certificate", func(t *testing.T) {
			t.Parallel()
			unauthorized(t, from, address)
		})
	}
}

// unauthorized uses its own certificate and requests an intercept as an owner would.
func unauthorized(t *testing.T, v *visitor, address string) {
	t.Helper()
	raw, err := dialIn(v.network, address)
	if err != nil {
		return // the port accepts only this pod's own network
	}
	defer raw.Close()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(raw, &tls.Config{
		InsecureSkipVerify: true, // the client accepts any server
		Certificates:       []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	})
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if c.Handshake() != nil {
		return
	}
	// With TLS 1.3, the client's handshake completes before the server has checked the certificate.
	if _, err := c.Write(make([]byte, 64)); err != nil {
		return
	}
	if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s said %d bytes to an unauthorized client, %v", address, n, err)
	}
}

// agentPorts returns the TCP ports on which the agents of a pod listen.
func (s *shop) agentPorts(t *testing.T, pod string) []int {
	t.Helper()
	var ports []int
	for _, pid := range s.agents(t, pod) {
		inodes := map[string]bool{}
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil {
				if inode, ok := strings.CutPrefix(target, "socket:["); ok {
					inodes[strings.TrimSuffix(inode, "]")] = true
				}
			}
		}
		for _, family := range []string{"tcp", "tcp6"} {
			table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, family))
			if err != nil {
				continue // the pod has no IPv6
			}
			for line := range strings.Lines(string(table)) {
				if f := strings.Fields(line); len(f) > 9 && f[3] == "0A" && inodes[f[9]] {
					_, hexPort, _ := strings.Cut(f[1], ":")
					if port, err := strconv.ParseInt(hexPort, 16, 32); err == nil {
						ports = append(ports, int(port))
					}
				}
			}
		}
	}
	return ports
}
