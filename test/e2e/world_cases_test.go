//go:build e2e && linux

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// casesManifest has a pod with a native sidecar in front of the application, without a token or a volume, whose
// containers see each other's processes and may not write; and Services that name one port in three ways.
const casesManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: cases}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: cases, namespace: cases}
spec:
  selector: {matchLabels: {app: cases, track: main}}
  template:
    metadata: {labels: {app: cases, track: main}}
    spec:
      terminationGracePeriodSeconds: 1
      automountServiceAccountToken: false
      shareProcessNamespace: true
      securityContext: {runAsNonRoot: true, runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
      initContainers:
      - name: front
        image: APP_IMAGE
        imagePullPolicy: Never
        restartPolicy: Always
        args: [-http, "8000"]
        env: [{name: WHO, value: front}]
        ports: [{containerPort: 8000, name: web}]
        securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        env: [{name: WHO, value: app}]
        ports:
        - {containerPort: 8080, name: http}
        - {containerPort: 9004, name: first}
        - {containerPort: 9005, name: says}
        - {containerPort: 9090, name: grpc}
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
        securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
---
apiVersion: v1
kind: Service
metadata: {name: cases, namespace: cases}
spec:
  selector: {app: cases}
  sessionAffinity: ClientIP
  ports:
  - {name: http, port: 80, targetPort: http}
  - {name: number, port: 81, targetPort: 8080}
  - {name: first, port: 9004, targetPort: first}
  - {name: says, port: 9005, targetPort: says}
  - {name: grpc, port: 9090, targetPort: grpc}
---
apiVersion: v1
kind: Service
metadata: {name: other, namespace: cases}
spec: {selector: {app: cases}, ports: [{name: web, port: 80, targetPort: 8080}, {name: raw, port: 9001}]}
---
apiVersion: v1
kind: Service
metadata: {name: front, namespace: cases}
spec: {selector: {app: cases}, ports: [{port: 80, targetPort: web}]}
`

// otherPod is a pod to which the Services send too. It is on no node, so it answers no client.
const otherPod = `
apiVersion: v1
kind: Pod
metadata: {name: theirs, namespace: cases, labels: {app: cases}}
spec: {nodeSelector: {no: node}, containers: [{name: app, image: none}]}
`

// cases are the conditions of the subtests: a client in the cluster, and the name of the program that should answer it.
type cases struct {
	*shop
	v      *visitor
	ip     string // of the Service
	other  string // of another one
	want   string
	header []string // of each request; nil: they are not for the laptop
}

// worldCases starts one intercept with a match. It checks, for requests with and without the header, that clients
// cannot distinguish the agent from the server.
func worldCases(t *testing.T, l *laptop) {
	l.apply(t, strings.ReplaceAll(casesManifest, "APP_IMAGE", appRef))
	s := &shop{l.world, "cases", "deployment/cases"}
	s.rolledOut(t)
	pod := s.kubectl(t, "-n", "cases", "get", "pods", "-l", "app=cases", "-o", "jsonpath={.items[0].metadata.name}")
	c := cases{shop: s, v: s.visitor(t), ip: s.clusterIP(t, "cases", "cases"), other: s.clusterIP(t, "cases", "other"),
		want: pod}
	t.Run("environment_in_a_shared_process_namespace", func(t *testing.T) {
		out := l.must(t, "kubevpn", "dev", s.workload, "-n", "cases", "-c", "app", "--",
			"sh", "-c", "echo $WHO $HOSTNAME")
		if out != "app "+pod {
			t.Errorf("the program has the environment of %s", out)
		}
	})
	t.Run("kubeconfigs_by_relative_paths", func(t *testing.T) { severalKubeconfigs(t, l) })
	l.proxy(t, s, "-c", "app", "--headers", mine+"="+me, "--cache")
	t.Run("to_the_pod", c.all)
	c.want, c.header = "laptop", []string{mine, me}
	t.Run("to_the_laptop", c.all)
	t.Run("each_new_pod_is_intercepted", c.scaled)
	l.leave(t, s)
	c.changed(t, l)
}

// changed tests operations that change the pods: a clone, sidecars, and the native sidecar.
func (c cases) changed(t *testing.T, l *laptop) {
	s := c.shop
	t.Run("a_clone_has_its_native_sidecar", func(t *testing.T) {
		l.must(t, "kubevpn", "clone", s.workload, "-n", "cases", "-c", "app", "--name", "copy",
			"--headers", mine+"="+me)
		defer l.leave(t, s)
		for _, path := range []string{"/", "/via?drop=none&to=http://127.0.0.1:8000/"} {
			if err := c.v.of("http://"+c.ip+path, "copy-", c.header...); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("a_sidecar_takes_no_Service_from_others", func(t *testing.T) {
		s.apply(t, otherPod)
		failure{code: api.ExitIntercept, hint: "a name in both templates", within: soon,
			message: "the Service other would no longer send to the pod theirs of another workload"}.check(t,
			l.run(t, "kubevpn", "proxy", s.workload, "-n", "cases", "-c", "app", "--port", "9001", "--mode", "sidecar"))
		s.kubectl(t, "-n", "cases", "delete", "pod", "theirs", "--now")
	})
	t.Run("a_sidecar_is_at_each_Service_port", func(t *testing.T) {
		r := l.proxy(t, s, "-c", "app", "--port", "8080", "--mode", "sidecar", "--headers", mine+"="+me)
		if !strings.Contains(r.stdout+r.stderr, "port 8000 of the container front, to which the Service front sends") {
			t.Errorf("the command does not name the native sidecar: %v", r)
		}
		testenv.Eventually(t, soon, c.ports)
		l.leave(t, s)
	})
	t.Run("it_comes_back_during_the_rollout", func(t *testing.T) {
		r := l.proxy(t, s, "-c", "app", "--port", "8080", "--headers", mine+"="+me)
		i := l.of(t, s)
		if i == nil || i.Mode == api.ModeSidecar && !strings.Contains(i.ModeReason, "has an agent as a sidecar") {
			t.Errorf("%+v: %v", i, r)
		}
		testenv.Eventually(t, soon, c.ports)
		l.leave(t, s)
		s.rolledOut(t)
	})
	t.Run("the_native_sidecar_is_intercepted", func(t *testing.T) {
		l.proxy(t, s, "-c", "front", "--port", "8080:8000", "--headers", mine+"="+me)
		defer l.leave(t, s)
		if err := c.v.want("http://"+s.clusterIP(t, "cases", "front")+"/", "laptop", c.header...); err != nil {
			t.Error(err)
		}
	})
}

func (c cases) all(t *testing.T) {
	t.Run("bytes_cross", c.bytes)
	t.Run("a_server_that_speaks_first_is_heard", c.speaksFirst)
	t.Run("a_client_that_half_closes_gets_its_answer", c.halfCloses)
	t.Run("a_request_in_chunks_needs_no_POST", c.chunkedGet)
	t.Run("a_head_of_half_a_megabyte", c.longHead)
	t.Run("a_request_follows_a_long_answer_in_chunks", c.keepsAlive)
	t.Run("a_connection_is_one_at_the_server", c.connections)
	t.Run("a_304_with_a_length_ends_no_connection", c.unchanged)
	t.Run("a_long_status_of_a_call", c.longStatus)
	t.Run("the_server_ends_a_call_first", c.endsFirst)
	t.Run("each_Service_port_leads_to_the_port", func(t *testing.T) {
		if err := c.ports(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a_native_sidecar_is_in_front", c.front)
}

// severalKubeconfigs sets KUBECONFIG to lists of paths below the current directory.
func severalKubeconfigs(t *testing.T, l *laptop) {
	text, err := os.ReadFile(l.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, content := range map[string]string{"a": "apiVersion: v1\nkind: Config\n", "b": string(text)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := l.sh(t, "cd %s && KUBECONFIG=a:b %s list -n cases", dir, l.program)
	if !strings.Contains(r.stdout, "deployment/cases") {
		t.Error(r)
	}
}

// dial connects to a port of the Service.
func (c cases) dial(t *testing.T, port string) net.Conn {
	t.Helper()
	conn, err := dialIn(c.v.network, net.JoinHostPort(c.ip, port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// bytes sends requests and answers that a proxy could misunderstand. Each answer must arrive unchanged.
func (c cases) bytes(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nx-name: NAME\r\n"
	for name, tt := range map[string]struct {
		line, lines string // of the request
		answer      string
		then        string // crosses in both directions, after the answer
	}{
		"a_tunnel_begins_with_a_length": {"CONNECT example.com:443 HTTP/1.1", "", ok + "Content-Length: 0\r\n\r\n",
			"\x16\x03\x01"},
		"an_upgrade_is_ignored": {"GET / HTTP/1.1", "Upgrade: TLS/1.2\r\nConnection: Upgrade\r\n",
			ok + "Content-Length: 2\r\n\r\nok", ""},
		"an_upgrade_to_a_protocol_of_theirs": {"POST / HTTP/1.1",
			"Upgrade: theirs\r\nConnection: upgrade\r\nContent-Length: 0\r\n",
			"HTTP/1.1 101 Switching\r\nx-name: NAME\r\nUpgrade: theirs\r\nConnection: upgrade\r\n\r\n", "\x00\x01"},
		"the_length_of_an_answer_to_HEAD": {"HEAD / HTTP/1.1", "", ok + "Content-Length: 9757\r\n\r\n", ""},
		"HTTP_1_0": {"GET / HTTP/1.0", "", "HTTP/1.0 200 OK\r\nx-name: NAME\r\n\r\nuntil the end",
			""},
		"early_hints": {"GET / HTTP/1.1", "",
			"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + ok + "Content-Length: 0\r\n\r\n", ""},
		"a_100_before_the_answer": {"POST / HTTP/1.1", "Expect: 100-continue\r\nContent-Length: 0\r\n",
			"HTTP/1.1 100 Continue\r\n\r\n" + ok + "Content-Length: 2\r\n\r\nok", ""},
		"an_answer_without_a_length": {"GET / HTTP/1.1", "", ok + "Connection: close\r\n\r\nuntil the end", ""},
		"a_length_said_twice":        {"GET / HTTP/1.1", "", ok + "Content-Length: 2\r\nContent-Length: 2\r\n\r\nok", ""},
		"events_and_trailers": {"GET / HTTP/1.1", "", ok + "Content-Type: text/event-stream\r\nTrailer: x-sum\r\n" +
			"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n0\r\nx-sum: 1\r\n\r\n", ""},
		"an_answer_breaks_off": {"GET / HTTP/1.1", "", ok + "Content-Length: 200\r\n\r\nhalf", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "an_answer_breaks_off" && c.header != nil {
				return // the agent resets the connection: the laptop may have gone
			}
			lines := tt.lines + "X-Say: " + url.PathEscape(tt.answer) + "\r\n"
			if c.header != nil {
				lines += strings.Join(c.header, ": ") + "\r\n"
			}
			conn := c.dial(t, "9005")
			if _, err := io.WriteString(conn, tt.line+"\r\nHost: a\r\n"+lines+"\r\n"); err != nil {
				t.Fatal(err)
			}
			want := strings.ReplaceAll(tt.answer, "NAME", c.want)
			got := make([]byte, len(want))
			if n, err := io.ReadFull(conn, got); string(got[:n]) != want {
				t.Fatalf("the client got\n%q (%v), want\n%q", got[:n], err, want)
			}
			if _, err := io.WriteString(conn, tt.then); err != nil {
				t.Fatal(err)
			}
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if rest, err := io.ReadAll(conn); err != nil || string(rest) != tt.then {
				t.Errorf("then %q (%v), want %q", rest, err, tt.then)
			}
		})
	}
}

// speaksFirst expects the pod to answer in both cases, because only HTTP has headers.
func (c cases) speaksFirst(t *testing.T) {
	conn := c.dial(t, "9004")
	r := bufio.NewReader(conn)
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "220 cases-") {
		t.Fatalf("%q, %v", line, err)
	}
	for _, text := range []string{"EHLO a\r\n", "GET / HTTP/1.1\r\n"} {
		if _, err := io.WriteString(conn, text); err != nil {
			t.Fatal(err)
		}
		if line, err := r.ReadString('\n'); err != nil || line != text {
			t.Errorf("%q, %v", line, err)
		}
	}
}

func (c cases) halfCloses(t *testing.T) {
	conn := c.dial(t, "80")
	lines := ""
	if c.header != nil {
		lines = strings.Join(c.header, ": ") + "\r\n"
	}
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"+lines+"\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.Header.Get("X-Name") != c.want || len(text) == 0 {
		t.Errorf("%s, %q: %v", resp.Header.Get("X-Name"), text, err)
	}
}

func (c cases) chunkedGet(t *testing.T) {
	query := `{"docs": [{"_id": "foo"}]}`
	body := struct{ io.Reader }{strings.NewReader(query)} // net/http does not know its length
	a, err := c.v.ask(http.MethodGet, "http://"+c.ip+"/_mget", body, c.header...)
	sum := sha256.Sum256([]byte(query))
	if err != nil || a.Name != c.want || a.Body.SHA256 != hex.EncodeToString(sum[:]) {
		t.Errorf("%+v, %v", a, err)
	}
}

func (c cases) longHead(t *testing.T) {
	long := strings.Repeat("a", 600<<10)
	path := "/" + long[:9000]
	a, err := c.v.ask(http.MethodGet, "http://"+c.ip+path+"?q="+long[:9000], nil, append(c.header, "Cookie", long)...)
	if err != nil || a.Name != c.want || a.Header.Get("Cookie") != long || a.Path != path {
		t.Errorf("%s answers: %v", a.Name, err)
	}
}

func (c cases) keepsAlive(t *testing.T) {
	v := c.regular(t)
	for range 3 {
		req, err := http.NewRequest(http.MethodGet, "http://"+c.ip+"/download?bytes=196608", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if c.header != nil {
			req.Header.Set(c.header[0], c.header[1])
		}
		resp, err := v.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		sum, name := sha256.Sum256(text), resp.Header.Get("X-Name")
		if err != nil || name != c.want || resp.Trailer.Get("X-Sha256") != hex.EncodeToString(sum[:]) {
			t.Errorf("%s answers with %d bytes, trailer %v: %v", name, len(text), resp.Trailer, err)
		}
	}
}

// connections checks that a server that authenticates connections sees those of its clients.
func (c cases) connections(t *testing.T) {
	remote := map[string]int{}
	for range 2 {
		v := c.regular(t)
		for range 3 {
			a, err := v.ask(http.MethodGet, "http://"+c.ip+"/", nil, c.header...)
			if err != nil || a.Name != c.want {
				t.Fatalf("%s answers: %v", a.Name, err)
			}
			remote[a.Remote]++
		}
	}
	if len(remote) != 2 {
		t.Errorf("the requests of two connections came by %v", remote)
	}
}

func (c cases) unchanged(t *testing.T) {
	dials := 0
	tr := &http.Transport{Protocols: new(http.Protocols),
		DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
			dials++
			return dialIn(c.v.network, address)
		}}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	for range 3 {
		req, err := http.NewRequest(http.MethodGet, "http://"+c.ip+"/unchanged", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if c.header != nil {
			req.Header.Set(c.header[0], c.header[1])
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		h := resp.Header
		if resp.StatusCode != http.StatusNotModified || h.Get("X-Name") != c.want || h.Get("Content-Length") != "7" {
			t.Errorf("%s: %v", resp.Status, h)
		}
	}
	if dials != 1 {
		t.Errorf("the client connected %d times", dials)
	}
}

// calls returns a client of the application's calls, and a context with the header.
func (c cases) calls(t *testing.T) (testgrpc.TestServiceClient, context.Context) {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(c.ip, "9090"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(_ context.Context, address string) (net.Conn, error) {
			return dialIn(c.v.network, address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	t.Cleanup(cancel)
	return testgrpc.NewTestServiceClient(conn), metadata.AppendToOutgoingContext(ctx, c.header...)
}

func (c cases) longStatus(t *testing.T) {
	client, ctx := c.calls(t)
	message := strings.Repeat("a", 14<<10)
	var trailer metadata.MD
	_, err := client.UnaryCall(ctx, &testgrpc.SimpleRequest{
		ResponseStatus: &testgrpc.EchoStatus{Code: int32(codes.DataLoss), Message: message}}, grpc.Trailer(&trailer))
	s := status.Convert(err)
	if s.Code() != codes.DataLoss || s.Message() != message || strings.Join(trailer["x-name"], ",") != c.want {
		t.Errorf("%v with %d bytes, trailer %v", s.Code(), len(s.Message()), trailer)
	}
}

// endsFirst checks calls that the server ends while clients have more to send.
func (c cases) endsFirst(t *testing.T) {
	client, ctx := c.calls(t)
	for n := range 50 {
		stream, err := client.FullDuplexCall(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&testgrpc.StreamingOutputCallRequest{
			ResponseStatus: &testgrpc.EchoStatus{Code: int32(codes.Unauthenticated), Message: "no"}}); err != nil {
			t.Fatal(err)
		}
		out, err := stream.Recv()
		if err == nil && bytes.HasPrefix(out.GetPayload().GetBody(), []byte(c.want+":")) {
			_, err = stream.Recv()
		}
		if status.Code(err) != codes.Unauthenticated {
			t.Fatalf("call %d: %v, %v", n, out, err)
		}
	}
}

// ports sends a request to each port of a Service that leads to the intercepted port.
func (c cases) ports() error {
	var errs []error
	for _, address := range []string{c.ip + ":80", c.ip + ":81", c.other + ":80"} {
		errs = append(errs, c.v.want("http://"+address+"/", c.want, c.header...))
	}
	return errors.Join(errs...)
}

func (c cases) front(t *testing.T) {
	url := "http://" + c.clusterIP(t, "cases", "front") + "/via?drop=none&to=http://127.0.0.1:8080/"
	if err := c.v.want(url, c.want, c.header...); err != nil {
		t.Error(err)
	}
}

func (c cases) scaled(t *testing.T) {
	c.kubectl(t, "-n", "cases", "scale", c.workload, "--replicas=2")
	c.rolledOut(t)
	testenv.Eventually(t, soon, func() error {
		var errs []error
		pods := c.pods(t, "cases", "app=cases")
		for _, ip := range pods {
			errs = append(errs, c.v.want("http://"+net.JoinHostPort(ip.String(), "8080")+"/", c.want, c.header...))
		}
		if len(pods) < 2 {
			errs = append(errs, fmt.Errorf("%d pods", len(pods)))
		}
		return errors.Join(errs...)
	})
}
