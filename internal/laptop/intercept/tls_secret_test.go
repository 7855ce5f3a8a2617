package intercept

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

func TestTLSTerminationRequiresAMatchingPair(t *testing.T) {
	certificate, key := pair(t)
	_, otherKey := pair(t)
	secrets := map[string]map[string][]byte{
		"good":   {corev1.TLSCertKey: certificate, corev1.TLSPrivateKeyKey: key},
		"opaque": {"password": []byte("x")},
		"mixed":  {corev1.TLSCertKey: certificate, corev1.TLSPrivateKeyKey: otherKey},
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		data, ok := secrets[path.Base(r.URL.Path)]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
			return
		}
		_ = json.NewEncoder(w).Encode(corev1.Secret{TypeMeta: metav1.TypeMeta{Kind: "Secret", APIVersion: "v1"}, Data: data})
	}))
	defer s.Close()
	kubeconfig := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: %q}}]}`, s.URL)
	c, err := client.Load([]byte(kubeconfig), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, err string }{
		{"good", ""},
		{"opaque", "cannot serve TLS with the Secret shop/opaque: it has no tls.crt or no tls.key"},
		{"mixed", "cannot serve TLS with the Secret shop/mixed: tls: private key does not match public key"},
		{"missing", `secrets "missing" not found in namespace "shop"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := TLSTermination(t.Context(), c, "shop", tt.name)
			if tt.err == "" {
				if err != nil || !slices.Equal(got.Certificate, certificate) || !slices.Equal(got.Key, key) {
					t.Errorf("TLSTermination = %+v, %v", got, err)
				}
				return
			}
			var e *api.Error
			if !errors.As(err, &e) || e.Code != api.ExitWorkload || e.Message != tt.err || e.Hint == "" {
				t.Errorf("error = %+v, want %s", err, tt.err)
			}
		})
	}
}

// pair returns a certificate and its key, as PEM.
func pair(t *testing.T) (certificate, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded})
}
