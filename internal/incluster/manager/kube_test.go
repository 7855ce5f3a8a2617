package manager

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
)

func TestAPIServersComeFromEnvironment(t *testing.T) {
	tests := []struct {
		name             string
		host, port, list string
		want             []string
	}{
		{"both", "10.96.0.1", "443", "192.168.0.1:6443, 192.168.0.2:6443", []string{"10.96.0.1:443", "192.168.0.1:6443", "192.168.0.2:6443"}},
		{"in-cluster-only", "10.96.0.1", "443", "", []string{"10.96.0.1:443"}},
		{"list-only", "", "", "192.168.0.1:6443", []string{"192.168.0.1:6443"}},
		{"ipv6", "fd00:96::1", "443", "[fd00::1]:6443,", []string{"[fd00:96::1]:443", "[fd00::1]:6443"}},
		{"name", "api.example.com", "443", "", []string{"api.example.com:443"}},
		{"nothing", "", "", "", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := apiServers(func(name string) string {
				return map[string]string{"KUBERNETES_SERVICE_HOST": tt.host, "KUBERNETES_SERVICE_PORT": tt.port, "KUBEVPN_APISERVERS": tt.list}[name]
			})
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestKubeClientIsNilWithoutServiceAccount(t *testing.T) {
	if c, err := kubeClient(t.TempDir(), []string{"10.96.0.1:443"}); c != nil || err != nil {
		t.Errorf("without a token: %v, %v", c, err)
	}
}

// apiServerFor answers /version as a server whose certificate is for names. It counts connections.
func apiServerFor(t *testing.T, names ...string) (addr string, ca []byte, connections *atomic.Int32) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: names, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	connections = new(atomic.Int32)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write([]byte(`{"kind":"NodeList","apiVersion":"v1","items":[]}`))
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			connections.Add(1)
		}
	}
	server.Config.ErrorLog = nil
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), connections
}

func TestDialFirstFailsOver(t *testing.T) {
	good, ca, goodCount := apiServerFor(t, "kubernetes", "kubernetes.default.svc")
	closed := testenv.ClosedPort(t, "tcp").String()
	wrongName, wrongCA, _ := apiServerFor(t, "example.com")
	tests := []struct {
		name    string
		servers []string
		ca      []byte
		want    string // part of the error
	}{
		{"first-works", []string{good, closed}, ca, ""},
		{"first-refuses", []string{closed, good}, ca, ""},
		{"first-is-silent", []string{managertest.FullListener(t), closed, good}, ca, ""},
		{"none-works", []string{closed, closed}, ca, "connection refused"},
		{"wrong-name", []string{wrongName}, wrongCA, "example.com"},
		{"wrong-authority", []string{good}, wrongCA, "certificate"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range map[string][]byte{"token": []byte("secret\n"), "ca.crt": tt.ca} {
				if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			kube, err := kubeClient(dir, tt.servers)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), managertest.Timeout)
			defer cancel()
			_, err = kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v", err)
			}
		})
	}
	if goodCount.Load() == 0 {
		t.Error("the good server received no request")
	}
}

func TestDialFirstPrefersFirstServer(t *testing.T) {
	a, b := managertest.Listen(t), managertest.Listen(t)
	for range 10 {
		conn, err := dialFirst(t.Context(), "tcp", []string{a.Addr().String(), b.Addr().String()})
		if err != nil {
			t.Fatal(err)
		}
		if conn.RemoteAddr().String() != a.Addr().String() {
			t.Errorf("connected to %v", conn.RemoteAddr())
		}
		conn.Close()
	}
}
