package intercept

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
)

// answering is a server on a loopback address that answers each request with a word.
func answering(t *testing.T, word string) (address string, port uint16) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, word) }))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String(), uint16(s.Listener.Addr().(*net.TCPAddr).Port)
}

// ask sends requests over one connection that takes a shortcut, and returns the answers.
func ask(t *testing.T, s shortcut, dst netip.AddrPort, app string, users ...string) (answers []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s(t.Context(), conn, client.LocalAddr().(*net.TCPAddr).AddrPort(), dst, func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", app)
		})
	}()
	r := bufio.NewReader(client)
	for _, user := range users {
		fmt.Fprintf(client, "GET / HTTP/1.1\r\nHost: web\r\nX-User: %s\r\n\r\n", user)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		if _, err := fmt.Fprint(&b, resp.StatusCode, " ", resp.Header.Get("Cache-Control"), " "); err != nil {
			t.Fatal(err)
		}
		if err := resp.Write(&b); err != nil {
			t.Fatal(err)
		}
		text := b.String()
		answers = append(answers, fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("Cache-Control"), " ", text[strings.LastIndex(text, "\n")+1:]))
	}
	client.Close()
	<-done
	return answers
}

func TestRequestsOfThisMachineStayHere(t *testing.T) {
	_, local := answering(t, "laptop")
	app, _ := answering(t, "app")
	w := newWorld(t, "web-1")
	spec := api.InterceptSpec{
		Match: httpmatch.Spec{Headers: []httpmatch.Named{{Name: "x-user", Value: "me"}}},
		Ports: []api.PortMap{{Protocol: "tcp", Container: 8080, Local: local}},
	}
	i, stop, err := begin(t, w, spec)
	if err != nil {
		t.Fatal(err)
	}
	await := func(what string, n int) map[netip.AddrPort]shortcut {
		t.Helper()
		to, err := w.shortcuts.Await(t.Context(), func(to map[netip.AddrPort]shortcut) bool { return len(to) == n })
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		return to
	}
	to := await("the Service and the pod", 2)
	for at, s := range to {
		if got, want := ask(t, s, at, app, "me", "you", "me"), "[200 no-store laptop 200  app 200 no-store laptop]"; fmt.Sprint(got) != want {
			t.Errorf("at %v: %q, want %s", at, got, want)
		}
	}
	if to[netip.MustParseAddrPort(clusterIP+":80")] == nil {
		t.Errorf("no ClusterIP among %v", to)
	}
	if n := i.Status().Requests; n != 4 {
		t.Errorf("%d requests", n)
	}
	if tr := i.Trace(t.Context(), api.AgentOrder{Trace: "0123456789abcdef0123456789abcdef"}); tr.Shortcuts[netip.MustParseAddrPort(clusterIP+":80")] != 8080 {
		t.Errorf("%+v", tr.Shortcuts)
	}
	leave := i.records.join(0)
	await("while requests are recorded", 0)
	leave()
	await("afterwards", 2)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if left := w.shortcuts.Load(); left != nil {
		t.Errorf("left: %v", left)
	}
}

// A sidecar's port of a pod is the one on which the agent listens, whichever number is higher.
func TestShortcutsLeadToTheListenPort(t *testing.T) {
	i := &Intercept{subject: subject{workload: newWorld(t).workload}, podSet: podSet{byUID: map[types.UID]*podIntercept{}}}
	i.workload.Services = nil
	i.claim.Ports = []api.AgentPort{{Protocol: "tcp", Port: 60000, Listen: 14465}, {Protocol: "tcp", Port: 8080}, {Protocol: "udp", Port: 8080}, {Protocol: "udp", Port: 53}}
	i.byUID["a"] = &podIntercept{i: i, phase: verified, linked: sessionState{claimed: true, attached: true}, pod: &corev1.Pod{Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.244.0.9"}}}}}
	want := map[netip.AddrPort]uint16{netip.MustParseAddrPort("10.244.0.9:14465"): 60000, netip.MustParseAddrPort("10.244.0.9:8080"): 8080}
	if got := i.ownAddresses(); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestSomeInterceptsHaveNoShortcut(t *testing.T) {
	for name, spec := range map[string]api.InterceptSpec{
		"mirror": {Mirror: true}, "asked": {NoShortcut: true}, "tls": {TLS: new(api.TLSTermination)},
	} {
		i, err := newIntercept(newWorld(t).config(newKey(t), spec), nil, nil)
		if err != nil || i.shortens() {
			t.Errorf("%s: %v", name, err)
		}
	}
}
