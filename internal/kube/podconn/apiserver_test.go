package podconn

import (
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gorilla "github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	constants "k8s.io/apimachinery/pkg/util/portforward"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"kubevpn/internal/kube/client"
)

// fakeAPIServer answers port-forwards with the Kubernetes project's own server code: gorilla's WebSocket and
// spdystream, as the API server, the kubelet and containerd use them.
type fakeAPIServer struct {
	*httptest.Server
	noWebSocket atomic.Bool // as Kubernetes before 1.30
	noSPDY      atomic.Bool // as some load balancers
	muteSPDY    atomic.Bool // as others
	pings       time.Duration
	requests    chan string                                     // "websocket" or "spdy", if not nil
	pod         func(port string, data, errs httpstream.Stream) // what stands behind the port

	mu     sync.Mutex
	conns  map[httpstream.Connection]struct{}
	wg     sync.WaitGroup
	closed bool // guarded by mu
}

func newFakeAPIServer(t testing.TB, pod func(port string, data, errs httpstream.Stream)) *fakeAPIServer {
	s := &fakeAPIServer{pod: pod, requests: make(chan string, 100), conns: map[httpstream.Connection]struct{}{}}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		s.mu.Lock()
		s.closed = true
		for c := range s.conns {
			c.Close()
		}
		s.mu.Unlock()
		s.CloseClientConnections()
		s.Close()
		s.wg.Wait()
	})
	return s
}

// run runs f, unless the server is being closed: its handlers may still run then, as those of hijacked connections do.
func (s *fakeAPIServer) run(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.wg.Go(f)
	}
	return !s.closed
}

func (s *fakeAPIServer) serve(w http.ResponseWriter, r *http.Request) {
	if !strings.HasSuffix(r.URL.Path, "/portforward") || r.URL.Path != "/api/v1/namespaces/ns/pods/web/portforward" {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"pods \"gone\" not found","reason":"NotFound","code":404}`)
		return
	}
	handler := s.streams()
	var conn httpstream.Connection
	if gorilla.IsWebSocketUpgrade(r) {
		s.requests <- "websocket"
		if s.noWebSocket.Load() {
			http.Error(w, "unable to upgrade", http.StatusBadRequest)
			return
		}
		up := gorilla.Upgrader{Subprotocols: []string{constants.WebsocketsSPDYTunnelingPortForwardV1}}
		ws, err := up.Upgrade(w, r, nil)
		if err != nil {
			return
		}
		if conn, err = spdy.NewServerConnectionWithPings(portforward.NewTunnelingConnection("server", ws), handler, s.pings); err != nil {
			return
		}
	} else {
		s.requests <- "spdy"
		if s.muteSPDY.Load() {
			<-r.Context().Done()
			return
		}
		if s.noSPDY.Load() {
			http.Error(w, "unable to upgrade", http.StatusForbidden)
			return
		}
		if _, err := httpstream.Handshake(r, w, []string{constants.PortForwardV1Name}); err != nil {
			return
		}
		if conn = spdy.NewResponseUpgraderWithPings(s.pings).UpgradeResponse(w, r, handler); conn == nil {
			return
		}
	}
	s.mu.Lock()
	s.conns[conn] = struct{}{}
	s.mu.Unlock()
	if !s.run(func() {
		<-conn.CloseChan()
		conn.Close()
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
	}) {
		conn.Close()
	}
}

// streams pairs an error and a data stream and starts the pod on them, as the kubelet does.
func (s *fakeAPIServer) streams() httpstream.NewStreamHandler {
	var mu sync.Mutex
	var data, errs httpstream.Stream
	var replies *sync.WaitGroup // of a pair
	return func(stream httpstream.Stream, replySent <-chan struct{}) error {
		mu.Lock()
		defer mu.Unlock()
		if data == nil && errs == nil {
			replies = new(sync.WaitGroup)
			replies.Add(2)
		}
		sent := replies
		switch stream.Headers().Get(corev1.StreamType) {
		case corev1.StreamTypeData:
			data = stream
		case corev1.StreamTypeError:
			errs = stream
		}
		go func() {
			<-replySent
			sent.Done()
		}()
		if data != nil && errs != nil {
			d, e := data, errs
			data, errs = nil, nil
			s.run(func() {
				sent.Wait() // spdystream waits for ever when the connection ends before the reply
				s.pod(d.Headers().Get(corev1.PortHeader), d, e)
			})
		}
		return nil
	}
}

// dialer returns a Dialer for the server, which begins with that protocol as if it had worked.
func (s *fakeAPIServer) dialer(t testing.TB, p Protocol) *Dialer {
	t.Helper()
	return dialerOf(t, s.kubeconfig(t), p)
}

func dialerOf(t testing.TB, kubeconfig []byte, p Protocol) *Dialer {
	t.Helper()
	c, err := client.Load(kubeconfig, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	d := New(c)
	d.worked.Store(int32(p))
	return d
}

func (s *fakeAPIServer) kubeconfig(t testing.TB) []byte {
	t.Helper()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	out, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "ctx",
		Contexts:       map[string]*clientcmdapi.Context{"ctx": {Cluster: "lab", AuthInfo: "dev", Namespace: "ns"}},
		Clusters:       map[string]*clientcmdapi.Cluster{"lab": {Server: s.URL, CertificateAuthorityData: ca}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"dev": {Token: "secret"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// echo is a pod that sends everything back and half-closes after the laptop did.
func echo(_ string, data, errs httpstream.Stream) {
	io.Copy(data, data)
	data.Close()
	errs.Close()
}

// toTCP is a pod whose port is a listener of the test.
func toTCP(address string) func(string, httpstream.Stream, httpstream.Stream) {
	return func(port string, data, errs httpstream.Stream) {
		defer errs.Close()
		defer data.Close()
		conn, err := net.Dial("tcp", address)
		if err != nil {
			if port == "8081" { // the kubelet's order since 1.23: error, then resets
				fmt.Fprintf(errs, "error forwarding port %s: %v", port, err)
				data.Reset()
				errs.Reset()
				return
			}
			data.Close() // containerd's order
			fmt.Fprintf(errs, "error forwarding port %s to pod 1234, uid : failed to dial 8080: %v", port, err)
			return
		}
		defer conn.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			io.Copy(conn, data)
			conn.(*net.TCPConn).CloseWrite()
		}()
		io.Copy(data, conn)
		data.Close()
		<-done
	}
}
