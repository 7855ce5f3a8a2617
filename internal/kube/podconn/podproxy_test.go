package podconn

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

// proxyServer is an API server with pods/proxy that prefers HTTP/2. answer gets each request. If it returns true, the
// server upgrades the connection and passes it to pod.
func proxyServer(t testing.TB, answer func(w http.ResponseWriter, r *http.Request) bool, pod func(net.Conn, *bufio.Reader)) *httptest.Server {
	var pods sync.WaitGroup
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !answer(w, r) {
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Errorf("hijacking %s: %v", r.Proto, err)
			return
		}
		pods.Go(func() {
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
			pod(conn, rw.Reader)
		})
	}))
	s.EnableHTTP2 = true
	s.TLS = &tls.Config{NextProtos: []string{"h2", "http/1.1"}, ClientAuth: tls.RequestClientCert}
	s.StartTLS()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		pods.Wait()
	})
	return s
}

// proxyDialer returns a Dialer for the server, with a kubeconfig that change may change.
func proxyDialer(t testing.TB, s *httptest.Server, change func(testing.TB, *clientcmdapi.Cluster, *clientcmdapi.AuthInfo)) *Dialer {
	t.Helper()
	cluster := &clientcmdapi.Cluster{Server: s.URL,
		CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})}
	user := &clientcmdapi.AuthInfo{Token: "secret"}
	if change != nil {
		change(t, cluster, user)
	}
	text, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "ctx", Contexts: map[string]*clientcmdapi.Context{"ctx": {Cluster: "lab", AuthInfo: "dev"}},
		Clusters: map[string]*clientcmdapi.Cluster{"lab": cluster}, AuthInfos: map[string]*clientcmdapi.AuthInfo{"dev": user},
	})
	if err != nil {
		t.Fatal(err)
	}
	return dialerOf(t, text, AnyProtocol)
}

func upgrades(http.ResponseWriter, *http.Request) bool { return true }

func echoBack(conn net.Conn, r *bufio.Reader) { io.Copy(conn, r) }

func dialProxy(t testing.TB, c *Dialer) net.Conn {
	t.Helper()
	conn, err := c.PodProxy(t.Context(), webProxy)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

var webProxy = PodProxyOptions{Namespace: "ns", Pod: "web", Port: 10802, Path: "/", Protocol: "kubevpn"}

// Credentials, proxies and CAs of the kubeconfig apply to an upgrade, too.
func TestPodProxyUsesTheKubeconfig(t *testing.T) {
	cert, key := clientCertificate(t)
	var connects atomic.Int32
	tests := []struct {
		name   string
		change func(testing.TB, *clientcmdapi.Cluster, *clientcmdapi.AuthInfo)
		check  func(*http.Request) string
	}{
		{"token", nil, func(r *http.Request) string {
			return r.Header.Get("Authorization")
		}},
		{"token-file", func(t testing.TB, _ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
			file := t.TempDir() + "/token"
			if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			u.Token, u.TokenFile = "", file
		}, func(r *http.Request) string { return r.Header.Get("Authorization") }},
		{"client-certificate", func(_ testing.TB, _ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
			u.Token, u.ClientCertificateData, u.ClientKeyData = "", cert, key
		}, func(r *http.Request) string {
			if len(r.TLS.PeerCertificates) == 1 && r.TLS.PeerCertificates[0].Subject.CommonName == "dev" {
				return "Bearer secret"
			}
			return fmt.Sprintf("%d certificates", len(r.TLS.PeerCertificates))
		}},
		{"impersonation", func(_ testing.TB, _ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
			u.Impersonate = "jane"
		}, func(r *http.Request) string {
			if r.Header.Get("Impersonate-User") != "jane" {
				return "nobody is impersonated"
			}
			return r.Header.Get("Authorization")
		}},
		{"tls-server-name", func(_ testing.TB, c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			c.TLSServerName = "example.com" // in httptest's certificate
		}, func(r *http.Request) string {
			if r.TLS.ServerName != "example.com" {
				return "server name " + r.TLS.ServerName
			}
			return r.Header.Get("Authorization")
		}},
		{"proxy-url", func(t testing.TB, c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			c.ProxyURL = connectProxy(t, &connects)
		}, func(r *http.Request) string {
			if connects.Load() != 1 {
				return "the request bypassed the proxy"
			}
			return r.Header.Get("Authorization")
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			seen := make(chan *http.Request, 1)
			s := proxyServer(t, func(_ http.ResponseWriter, r *http.Request) bool {
				seen <- r
				return true
			}, echoBack)
			header := http.Header{"Kubevpn-Ticket": {"id.secret"}}
			conn, err := proxyDialer(t, s, test.change).PodProxy(t.Context(), PodProxyOptions{Namespace: "ns", Pod: "web", Port: 10802, Path: "/", Protocol: "kubevpn", Header: header})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r := <-seen
			if got := test.check(r); got != "Bearer secret" {
				t.Errorf("credentials: %s", got)
			}
			got := fmt.Sprintln(r.Method, r.URL, r.Proto, r.Header.Get("Connection"), r.Header.Get("Upgrade"), r.Header.Get("Kubevpn-Ticket"))
			if want := "GET /api/v1/namespaces/ns/pods/web:10802/proxy/ HTTP/1.1 Upgrade kubevpn id.secret\n"; got != want {
				t.Errorf("the request is %s, want %s", got, want)
			}
			if len(header) != 1 {
				t.Errorf("the caller's header was changed: %v", header)
			}
			if got, want := conn.RemoteAddr().String(), "ns/web:10802"; got != want {
				t.Errorf("RemoteAddr %s, want %s", got, want)
			}
			sent := make([]byte, 3<<20)
			rand.Read(sent)
			go func() {
				for chunk := range slicesChunks(sent, 200_001) {
					if _, err := conn.Write(chunk); err != nil {
						t.Error(err)
						return
					}
				}
			}()
			back := make([]byte, len(sent))
			conn.SetReadDeadline(time.Now().Add(20 * time.Second))
			if _, err := io.ReadFull(conn, back); err != nil || !bytes.Equal(back, sent) {
				t.Errorf("what comes back differs, %v", err)
			}
		})
	}
}

// A plugin may issue a certificate for another group before the first one expires.
func TestPodProxySendsTheLatestClientCertificate(t *testing.T) {
	noLeaks(t)
	seen := make(chan *tls.ConnectionState, 1)
	s := proxyServer(t, func(_ http.ResponseWriter, r *http.Request) bool {
		seen <- r.TLS
		return true
	}, echoBack)
	credential := func() *api.Credential {
		cert, key := clientCertificate(t)
		return &api.Credential{Certificate: string(cert), Key: string(key)}
	}
	d := proxyDialer(t, s, func(_ testing.TB, _ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
		u.Token, u.Exec = "", &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", Command: "/bin/false",
			InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
		}
	})
	for range 2 {
		latest := credential()
		if err := d.cluster.SetCredential(latest); err != nil {
			t.Fatal(err)
		}
		dialProxy(t, d)
		got := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: (<-seen).PeerCertificates[0].Raw})
		if string(got) != latest.Certificate {
			t.Error("the server sees the certificate of an earlier connection")
		}
	}
	if err := d.cluster.SetCredential(&api.Credential{Token: "secret"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []bool{false, true} {
		dialProxy(t, d)
		if state := <-seen; state.DidResume != want || len(state.PeerCertificates) > 0 {
			t.Errorf("with a token: resumed %v, want %v, %d certificates", state.DidResume, want,
				len(state.PeerCertificates))
		}
	}
}

// clientCertificate returns a self-signed certificate of the user dev.
func clientCertificate(t testing.TB) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "dev"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// connectProxy is an HTTP proxy that counts in n what goes through it.
func connectProxy(t testing.TB, n *atomic.Int32) string {
	var tunnels sync.WaitGroup
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, r.Method, http.StatusMethodNotAllowed)
			return
		}
		there, err := net.Dial("tcp", r.Host)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		here, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			there.Close()
			t.Error(err)
			return
		}
		n.Add(1)
		io.WriteString(here, "HTTP/1.1 200 OK\r\n\r\n")
		for _, pair := range [][2]net.Conn{{here, there}, {there, here}} {
			tunnels.Go(func() {
				io.Copy(pair[0], pair[1])
				pair[0].Close()
				pair[1].Close()
			})
		}
	}))
	t.Cleanup(func() {
		s.Close()
		tunnels.Wait()
	})
	return s.URL
}

func TestPodProxyNamesTheRefusal(t *testing.T) {
	status := func(code int, reason, message string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":%q,"reason":%q,"code":%d}`, message, reason, code)
			return false
		}
	}
	const denial = `pods "web:10802" is forbidden: User "jane" cannot get resource "pods/proxy" in API group "" in the namespace "ns"`
	tests := []struct {
		name   string
		answer func(http.ResponseWriter, *http.Request) bool
		is     func(error) bool
		words  string // the API server's
		code   api.ExitCode
		told   string
	}{
		{"forbidden", status(403, "Forbidden", denial), apierrors.IsForbidden, denial, api.ExitPermission, "jane may not get pods/proxy in namespace ns"},
		{"gone", status(404, "NotFound", `pods "web" not found`), apierrors.IsNotFound, `pods "web" not found`, api.ExitUnexpected, "not found in the cluster"},
		{"unreachable", status(500, "", "dial tcp 10.0.0.9:10802: i/o timeout"), nil, "dial tcp 10.0.0.9:10802: i/o timeout",
			api.ExitUnreachable, "cannot reach port 10802 of pod ns/web: dial tcp 10.0.0.9:10802: i/o timeout"},
		{"refused", status(500, "", "error dialing backend: dial tcp 10.244.1.5:10803: connect: connection refused"), nil, "connect: connection refused",
			api.ExitUnreachable, "cannot reach port 10802 of pod ns/web: error dialing backend: "},
		{"silent", status(500, "", "unexpected EOF"), nil, "unexpected EOF", api.ExitUnreachable, "port 10802 of pod ns/web closed the connection without an answer"},
		{"reset", status(500, "", "read tcp 10.0.0.1:5->10.244.1.5:10802: read: connection reset by peer"), nil, "reset by peer",
			api.ExitUnreachable, "port 10802 of pod ns/web closed the connection without an answer"},
		{"unreachable-by-konnectivity", status(503, "ServiceUnavailable", "error trying to reach service: EOF"), apierrors.IsServiceUnavailable, "error trying to reach service: EOF",
			api.ExitUnreachable, "cannot reach port 10802 of pod ns/web: error trying to reach service: EOF"},
		{"bad-gateway", func(w http.ResponseWriter, _ *http.Request) bool {
			http.Error(w, "error trying to reach service: EOF", http.StatusBadGateway)
			return false
		}, nil, "error trying to reach service: EOF", api.ExitUnreachable, "cannot reach port 10802 of pod ns/web"},
		{"upgrade-eaten", func(w http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprint(w, "hello")
			return false
		}, func(err error) bool { return errors.Is(err, errNoUpgrade) }, "200 OK", api.ExitUnreachable, "blocks HTTP upgrades"},
		{"another-protocol", func(w http.ResponseWriter, r *http.Request) bool {
			r.Header.Set("Upgrade", "h2c")
			return true
		}, func(err error) bool { return errors.Is(err, errNoUpgrade) }, `it answered with "h2c"`, api.ExitUnreachable, "blocks HTTP upgrades"},
		{"closed", func(w http.ResponseWriter, _ *http.Request) bool {
			panic(http.ErrAbortHandler)
		}, func(err error) bool { return errors.Is(err, io.EOF) }, "EOF", api.ExitUnreachable, "broke the connection"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			c := proxyDialer(t, proxyServer(t, test.answer, echoBack), nil)
			conn, err := c.PodProxy(t.Context(), webProxy)
			if err == nil {
				conn.Close()
				t.Fatal("PodProxy returned a connection")
			}
			if test.is != nil && !test.is(err) {
				t.Errorf("%v is of the wrong kind", err)
			}
			if !strings.Contains(err.Error(), test.words) || !strings.HasPrefix(err.Error(), "pods/proxy to port 10802 of pod ns/web: ") {
				t.Errorf("the error is %q, want it to contain %q", err, test.words)
			}
			if e := c.cluster.Explain(err); e.Code != test.code || !strings.Contains(e.Message, test.told) {
				t.Errorf("explained as %d, %s; want %d, %s", e.Code, e.Message, test.code, test.told)
			}
		})
	}
}

func TestPodProxyEndsWithItsContext(t *testing.T) {
	noLeaks(t)
	asked := make(chan struct{})
	c := proxyDialer(t, proxyServer(t, func(_ http.ResponseWriter, r *http.Request) bool {
		close(asked)
		<-r.Context().Done() // the laptop hangs up
		return false
	}, echoBack), nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		<-asked
		cancel(nil)
	}()
	if _, err := c.PodProxy(ctx, webProxy); !errors.Is(err, context.Canceled) {
		t.Errorf("PodProxy returned %v", err)
	}
}

func TestPodProxyOutlivesTheContextOfItsDial(t *testing.T) {
	noLeaks(t)
	c := proxyDialer(t, proxyServer(t, upgrades, echoBack), nil)
	ctx, cancel := context.WithCancel(t.Context())
	conn, err := c.PodProxy(ctx, webProxy)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cancel()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	for range 3 {
		if _, err := conn.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
}

// The connection has no half-close: it ends as a whole when the pod's side ends.
func TestPodProxyEndsWithThePod(t *testing.T) {
	for _, way := range []struct {
		name string
		end  func(net.Conn)
	}{
		{"close-notify", func(c net.Conn) { c.Close() }},
		{"no-close-notify", func(c net.Conn) { c.(*tls.Conn).NetConn().Close() }},
	} {
		t.Run(way.name, func(t *testing.T) {
			noLeaks(t)
			conn := dialProxy(t, proxyDialer(t, proxyServer(t, upgrades, func(c net.Conn, _ *bufio.Reader) {
				io.WriteString(c, "bye")
				way.end(c)
			}), nil))
			if _, ok := conn.(interface{ CloseWrite() error }); ok {
				t.Error("the connection has CloseWrite")
			}
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			if got, err := io.ReadAll(conn); string(got) != "bye" || err != nil {
				t.Errorf("read %q, %v", got, err)
			}
			var err error
			for err == nil { // until the server's kernel resets the connection
				_, err = conn.Write(make([]byte, 64<<10))
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("Write to a closed connection: %v", err)
			}
			if _, again := conn.Write([]byte("x")); again == nil {
				t.Error("a Write succeeds after a failed one")
			}
		})
	}
}

func TestPodProxyCloseReachesThePod(t *testing.T) {
	noLeaks(t)
	ended := make(chan error, 1)
	conn := dialProxy(t, proxyDialer(t, proxyServer(t, upgrades, func(_ net.Conn, r *bufio.Reader) {
		_, err := r.ReadByte()
		ended <- err
	}), nil))
	reading := make(chan error, 1)
	go func() {
		_, err := conn.Read(make([]byte, 1))
		reading <- err
	}()
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if err := conn.Close(); err != nil {
		t.Errorf("the second Close: %v", err)
	}
	if err := <-reading; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the blocked Read returned %v", err)
	}
	if _, err := conn.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write returned %v", err)
	}
	if err := <-ended; err == nil {
		t.Error("the pod read something")
	}
}

// The connection survives a Read that a deadline ended, but not such a Write.
func TestPodProxyDeadlinesEndCalls(t *testing.T) {
	noLeaks(t)
	release := make(chan struct{})
	conn := dialProxy(t, proxyDialer(t, proxyServer(t, upgrades, func(c net.Conn, r *bufio.Reader) {
		io.CopyN(c, r, 15)
		<-release
	}), nil))
	defer close(release)
	readDeadlinesHarmNothing(t, conn)
	conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
	var err error
	for err == nil {
		_, err = conn.Write(make([]byte, 1<<20))
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("Write: %v", err)
	}
	conn.SetWriteDeadline(time.Time{})
	if _, err := conn.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("Write after a deadline that cut one: %v", err)
	}
}
