package client

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	gorilla "github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// API servers before 1.35 refuse a WebSocket, but not SPDY, to a user who may `create` pods/exec and not `get` it. A
// proxy that does not know WebSockets refuses it to everybody.
func TestExecFallsBackToSPDY(t *testing.T) {
	for _, status := range []int{http.StatusForbidden, http.StatusBadRequest} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			var out bytes.Buffer
			c := clusterAt(t, serverOf(sayHello(t, status)), &clientcmdapi.AuthInfo{Token: "t"}, Options{})
			if err := c.Exec(t.Context(), ExecOptions{Namespace: "ns", Pod: "web", Container: "app", Command: []string{"cat"}, Stdout: &out}); err != nil || out.String() != "hello" {
				t.Errorf("%q, %v", out.String(), err)
			}
		})
	}
}

// client-go's other executors open connections of their own.
func TestExecThroughJumpHostsUsesTheirDialer(t *testing.T) {
	c := clusterAt(t, serverOf(sayHello(t, http.StatusTeapot)), &clientcmdapi.AuthInfo{Token: "t"}, Options{})
	e, err := c.jumpExecutor(c.config, c.server.JoinPath("exec"))
	if err != nil {
		t.Fatal(err)
	}
	var out, errout bytes.Buffer
	if err := e.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: &out, Stderr: &errout}); err != nil || out.String() != "hello" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if len(c.Addresses()) == 0 {
		t.Error("the dialer was not used")
	}
}

// sayHello returns a server that rejects WebSockets with the status, and whose programs print hello.
func sayHello(t *testing.T, status int) *httptest.Server {
	t.Helper()
	var programs sync.WaitGroup
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if gorilla.IsWebSocketUpgrade(r) {
			http.Error(w, "no", status)
			return
		}
		if _, err := httpstream.Handshake(r, w, []string{"v4.channel.k8s.io"}); err != nil {
			t.Error(err)
			return
		}
		streams := make(chan httpstream.Stream, 3)
		conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
			streams <- s
			return nil
		})
		programs.Go(func() {
			defer conn.Close()
			of := map[string]httpstream.Stream{}
			for len(of) < cap(streams) {
				s := <-streams
				of[s.Headers().Get(corev1.StreamType)] = s
			}
			fmt.Fprint(of[corev1.StreamTypeStdout], "hello")
			fmt.Fprint(of[corev1.StreamTypeError], `{"status":"Success"}`)
			for _, s := range of {
				s.Close()
			}
			<-conn.CloseChan()
		})
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		programs.Wait()
	})
	return server
}
