//go:build e2e && linux

package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// secureShop is an application that terminates TLS itself, with the certificate of a Secret.
const secureShop = `
apiVersion: v1
kind: Namespace
metadata: {name: secure-shop}
---
apiVersion: v1
kind: Secret
metadata: {name: shop-tls, namespace: secure-shop}
type: kubernetes.io/tls
data: {tls.crt: PAIR_CERT, tls.key: PAIR_KEY}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, namespace: secure-shop}
spec:
  replicas: 2
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: tls, secret: {secretName: shop-tls}}]
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        env: [{name: TLS_CERT, value: /tls/tls.crt}, {name: TLS_KEY, value: /tls/tls.key}]
        volumeMounts: [{name: tls, mountPath: /tls}]
        ports: [{containerPort: 8443, name: https}, {containerPort: 9443, name: grpcs}]
        readinessProbe: {httpGet: {path: /, port: https, scheme: HTTPS}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: secure-shop}
spec:
  selector: {app: shop}
  ports: [{name: https, port: 443, targetPort: https}, {name: grpcs, port: 9443, targetPort: grpcs}]
`

// certificate returns a self-signed certificate for any name that ends in .test, and its key, in PEM.
func certificate(t *testing.T, name string) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

// trusting returns a visitor that trusts one certificate for one name.
func (w *world) trusting(t *testing.T, name string, cert []byte, http2 bool) (*visitor, *tls.Config) {
	t.Helper()
	v := w.visitor(t)
	config := &tls.Config{ServerName: name, RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(cert) {
		t.Fatal("no certificate")
	}
	tr := v.http.Transport.(*http.Transport)
	tr.TLSClientConfig, tr.Protocols = config, new(http.Protocols)
	tr.Protocols.SetHTTP1(!http2)
	tr.Protocols.SetHTTP2(http2)
	return v, config
}

// tlsSuite checks that encrypted headers match with the application's own certificate, and only with it.
func tlsSuite(t *testing.T, w *world) {
	const name, other = "shop.test", "laptop.test"
	cert, key := certificate(t, name)
	laptopCert, laptopKey := certificate(t, other)
	w.loadApp(t)
	encode := base64.StdEncoding.EncodeToString
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "PAIR_CERT", encode(cert), "PAIR_KEY", encode(key)).Replace(secureShop))
	s := &shop{world: w, namespace: "secure-shop", workload: "deployment/shop"}
	s.rolledOut(t)
	l := w.newUser(t, lab.Admin)
	certFile, keyFile := filepath.Join(l.home, "cert"), filepath.Join(l.home, "key")
	if err := errors.Join(os.WriteFile(certFile, laptopCert, 0o600), os.WriteFile(keyFile, laptopKey, 0o600)); err != nil {
		t.Fatal(err)
	}
	l.startApp(t, "laptop", "-cert", certFile, "-key", keyFile)
	v1, config := w.trusting(t, name, cert, false)
	v2, _ := w.trusting(t, name, cert, true)
	toLaptop, _ := w.trusting(t, other, laptopCert, false)
	url := func(ip string) string { return "https://" + net.JoinHostPort(ip, "8443") + "/" }

	t.Run("headers_do_not_match_without_the_secret", func(t *testing.T) {
		r := l.proxy(t, s, "--headers", mine+"="+me)
		defer l.leave(t, s)
		for pod, ip := range s.ready(t) {
			for _, v := range []*visitor{v1, v2} { // the application terminates their TLS with its certificate
				if err := v.want(url(ip), pod, mine, me); err != nil {
					t.Error(err)
				}
			}
		}
		testenv.Eventually(t, soon, func() error {
			if i := l.intercept(t); !strings.Contains(strings.Join(i.Warnings, "\n"), "TLS") || i.State != api.InterceptActive || i.Requests != 0 {
				return fmt.Errorf("%+v", i)
			}
			return nil
		})
		if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, "cannot be matched") {
			t.Errorf("status does not say that headers cannot match: %s\n%v", out, r)
		}
	})
	t.Run("all_traffic_matches_without_the_secret", func(t *testing.T) {
		l.proxy(t, s)
		defer l.leave(t, s)
		for _, ip := range s.ready(t) { // TLS is unchanged, so the laptop's own certificate answers
			if err := toLaptop.want(url(ip), "laptop"); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("headers_match_with_the_secret", func(t *testing.T) {
		l.proxy(t, s, "--headers", mine+"="+me, "--tls-secret", "shop-tls")
		defer l.leave(t, s)
		recorded := l.follow(t, s, 2)
		for pod, ip := range s.ready(t) {
			for proto, v := range map[string]*visitor{"HTTP/1.1": v1, "HTTP/2.0": v2} {
				for want, header := range map[string][]string{"laptop": {mine, me}, pod: nil} {
					a, err := v.ask(http.MethodPost, url(ip), strings.NewReader("secret"), header...)
					if err != nil || a.Name != want || a.Proto != proto || a.Body.Length != 6 {
						t.Errorf("%s: %+v, %v; want %s", proto, a, err, want)
					}
				}
			}
			for want, header := range map[string][]string{"laptop": {mine, me}, pod: nil} {
				v1.grpcBy(t, credentials.NewTLS(config.Clone()), net.JoinHostPort(ip, "9443"), want, header)
			}
			out, err := v1.run(t, "curl", "-sSk", "--http2", "--max-time", "10", "-w", " %{http_version}", "-H", mine+": "+me, url(ip))
			if err != nil || !strings.Contains(out, `"name":"laptop"`) || !strings.HasSuffix(out, " 2") {
				t.Errorf("curl --http2: %s, %v", out, err)
			}
		}
		for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
			recorded.wait(proto+" inside TLS", func(e *api.Exchange) bool { return e.Request.Proto == proto && e.Request.Scheme == "https" })
		}
		recorded.stop()
		if w.Config().ProxyMode != lab.ProxyNone {
			vip := "https://" + w.clusterIP(t, s.namespace, "shop") + "/"
			if err := errors.Join(v1.want(vip, "laptop", mine, me), v1.want(vip, "a pod")); err != nil {
				t.Error(err)
			}
		}
		if i := l.intercept(t); len(i.Warnings) > 0 {
			t.Errorf("%q", i.Warnings)
		}
		// The key exists only in its Secret and in the agents.
		text := s.kubectl(t, "-n", s.namespace, "get", "pods,deployments,replicasets", "-o", "yaml")
		for _, secret := range []string{string(key), encode(key), encode(key)[:64], strings.Split(string(key), "\n")[1]} {
			if strings.Contains(text, secret) {
				t.Error("`get pods` shows the key")
			}
		}
	})
	t.Run("program_without_tls_gets_no_requests", func(t *testing.T) {
		l.proxy(t, s, "--headers", mine+"="+me, "--tls-secret", "shop-tls", "--port", "8080:8443")
		defer l.leave(t, s)
		for pod, ip := range s.ready(t) {
			if _, err := v1.ask(http.MethodGet, url(ip), nil, mine, me); err == nil || !strings.Contains(err.Error(), "502") || !strings.Contains(err.Error(), "TLS") {
				t.Errorf("the laptop's program speaks no TLS: %v", err)
			}
			if err := v1.want(url(ip), pod); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("missing_secret_is_reported", func(t *testing.T) {
		failure{code: api.ExitWorkload, message: "nothing-tls"}.
			check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--tls-secret", "nothing-tls"))
		if now := l.status(t).Intercepts; len(now) != 0 {
			t.Errorf("%+v", now)
		}
	})
	t.Run("application_answers_after_leave", func(t *testing.T) {
		testenv.Eventually(t, soon, func() error {
			return s.everyPod(t, func(ip string) error { return v1.want(url(ip), "a pod", mine, me) })
		})
	})
}
