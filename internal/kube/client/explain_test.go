package client

import (
	"context"
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
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// answer is an API server that gives the same answer to each request.
func answer(code int, status string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprint(w, status)
	})
}

func statusJSON(code int, reason, message string) string {
	return fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":%q}`, reason, code, message)
}

// ask makes one request with the kubeconfig's cluster and user, and explains the error. In the result, HOST stands for
// the server.
func ask(t *testing.T, timeout time.Duration, server string, ca []byte, user *clientcmdapi.AuthInfo) *api.Error {
	t.Helper()
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "c",
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: server, CertificateAuthorityData: ca}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": user},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := Load(kubeconfig, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, err = c.Kube().CoreV1().Pods("web").List(ctx, metav1.ListOptions{})
	if err == nil {
		t.Fatal("it worked")
	}
	e := c.Explain(fmt.Errorf("listing pods: %w", err))
	e.Message = strings.ReplaceAll(e.Message, c.server.Host, "HOST")
	return e
}

func check(t *testing.T, e *api.Error, code api.ExitCode, message, hint string) {
	t.Helper()
	if e.Code != code || e.Message != message || !strings.HasPrefix(e.Hint, hint) || hint == "" != (e.Hint == "") {
		t.Fatalf("code %d, %q\nhint %q\nwant %d, %q\nhint %q", e.Code, e.Message, e.Hint, code, message, hint)
	}
	if strings.Contains(e.Message, "\n") || strings.HasSuffix(e.Message, ".") {
		t.Fatalf("not one line without a period: %q", e.Message)
	}
}

func TestExplainNamesTheAnswer(t *testing.T) {
	const denial = `pods is forbidden: User "dev@example.com" cannot list resource "pods" in API group "" in the namespace "web"`
	tests := []struct {
		name   string
		status int
		body   string
		code   api.ExitCode
		want   string
		hint   string
	}{
		{"unauthorized", 401, statusJSON(401, "Unauthorized", "Unauthorized"), api.ExitCredentials,
			"the API server HOST rejects the kubeconfig's credentials", "Log in again, or fetch the kubeconfig again."},
		{"forbidden", 403, statusJSON(403, "Forbidden", denial), api.ExitPermission, "dev@example.com may not list pods in namespace web",
			"Ask a cluster admin to run:\n" +
				"kubectl create role kubevpn-list-pods --namespace=web --verb=list --resource=pods\n" +
				"kubectl create rolebinding kubevpn-list-pods --namespace=web --role=kubevpn-list-pods --user=dev@example.com"},
		{"forbidden, group and subresource", 403, statusJSON(403, "Forbidden", `deployments.apps "x" is forbidden: User "system:serviceaccount:ci:bot" cannot patch resource "deployments/scale" in API group "apps" in the namespace "web"`),
			api.ExitPermission, "system:serviceaccount:ci:bot may not patch deployments/scale in namespace web",
			"Ask a cluster admin to run:\n" +
				"kubectl create role kubevpn-patch-deployments-scale --namespace=web --verb=patch --resource=deployments.apps/scale\n" +
				"kubectl create rolebinding kubevpn-patch-deployments-scale --namespace=web --role=kubevpn-patch-deployments-scale --serviceaccount=ci:bot"},
		{"forbidden, cluster", 403, statusJSON(403, "Forbidden", `nodes is forbidden: User "o'dev" cannot list resource "nodes" in API group "" at the cluster scope`),
			api.ExitPermission, "o'dev may not list nodes in the whole cluster",
			"Ask a cluster admin to run:\nkubectl create clusterrole kubevpn-list-nodes --verb=list --resource=nodes\n" +
				`kubectl create clusterrolebinding kubevpn-list-nodes --clusterrole=kubevpn-list-nodes --user='o'\''dev'`},
		{"pod security", 403, statusJSON(403, "Forbidden", `pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged`), api.ExitInstall,
			`the namespace's pod security forbids it: pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged`, "Ask a cluster admin to install"},
		{"quota", 403, statusJSON(403, "Forbidden", `pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2`), api.ExitInstall,
			`the namespace's quota is used up: pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2`, "Free resources"},
		{"webhook", 403, statusJSON(403, "Forbidden", `admission webhook "policy.example" denied the request: no`), api.ExitInstall,
			`the cluster's policy forbids it: admission webhook "policy.example" denied the request: no`, "Ask a cluster admin"},
		{"escalation", 403, statusJSON(403, "Forbidden", `clusterroles "x" is forbidden: user "dev" is attempting to grant RBAC permissions not currently held: {...}`), api.ExitPermission,
			`you can grant only permissions that you hold: clusterroles "x" is forbidden: user "dev" is attempting to grant RBAC permissions not currently held: {...}`, "Ask a cluster admin to run `kubevpn install`."},
		{"not found", 404, statusJSON(404, "NotFound", `pods "x" not found`), api.ExitUnexpected, `not found in the cluster: pods "x" not found`, "If it existed"},
		{"unavailable", 503, statusJSON(503, "ServiceUnavailable", "etcd is away"), api.ExitUnreachable, "the API server HOST answers with error 503: etcd is away", "The cluster has a fault."},
		{"load balancer", 502, "<html>\nBad Gateway</html>", api.ExitUnreachable, "the API server HOST, or a proxy before it, answers with error 502: Bad Gateway", "The cluster or a load balancer has a fault."},
		{"timeout", 504, statusJSON(504, "Timeout", "request did not complete"), api.ExitUnreachable, "the API server HOST did not answer in time: request did not complete", "It is overloaded"},
		{"conflict", 409, statusJSON(409, "Conflict", "changed"), api.ExitUnexpected, "the API server HOST: changed", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := httptest.NewServer(answer(tt.status, tt.body))
			defer s.Close()
			check(t, ask(t, time.Minute, s.URL, nil, &clientcmdapi.AuthInfo{Token: "t"}), tt.code, tt.want, tt.hint)
		})
	}
}

func TestExplainNamesExpiredCredentials(t *testing.T) {
	s := httptest.NewTLSServer(answer(401, statusJSON(401, "Unauthorized", "Unauthorized")))
	defer s.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	claims := fmt.Sprintf(`{"exp":%d}`, time.Now().Add(-3*time.Hour).Unix())
	token := "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".sig"
	e := ask(t, time.Minute, s.URL, ca, &clientcmdapi.AuthInfo{Token: token})
	check(t, e, api.ExitCredentials, "the API server HOST rejects the kubeconfig's credentials: the token expired 3h ago", "Log in again")

	cert, key := certificate(t, nil, time.Now().Add(-48*time.Hour), time.Date(2024, 1, 2, 3, 4, 0, 0, time.UTC))
	e = ask(t, time.Minute, s.URL, ca, &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key})
	check(t, e, api.ExitCredentials, "the API server HOST rejects the kubeconfig's credentials: the client certificate expired on 2024-01-02 03:04 UTC", "Log in again")
}

// certificate makes a self-signed server certificate in PEM.
func certificate(t *testing.T, ips []net.IP, from, until time.Time) (cert, key []byte) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: from, NotAfter: until, IPAddresses: ips,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, priv.Public(), priv)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

// Handshakes that fail, against real TLS servers.
func TestExplainNamesTLSErrors(t *testing.T) {
	now := time.Now()
	loopback := []net.IP{net.IPv4(127, 0, 0, 1)}
	tests := []struct {
		name        string
		ips         []net.IP
		from, until time.Time
		otherCA     bool
		code        api.ExitCode
		want        string // %s: this machine's time
		hint        string
	}{
		{"expired", loopback, now.Add(-time.Hour), time.Date(2024, 1, 2, 3, 4, 0, 0, time.UTC), false, api.ExitUnreachable,
			"the certificate of the API server HOST expired on 2024-01-02 03:04 UTC, by this machine's clock (%s)", "Check this machine's clock"},
		{"clock behind", loopback, time.Date(2199, 1, 2, 3, 4, 0, 0, time.UTC), time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC), false, api.ExitUnreachable,
			"the certificate of the API server HOST is valid only from 2199-01-02 03:04 UTC on, and this machine's clock says %s", "Set this machine's clock"},
		{"other authority", loopback, now.Add(-time.Hour), now.Add(time.Hour), true, api.ExitUnreachable,
			"the API server HOST has a certificate that the kubeconfig's authority did not sign", "The cluster was recreated"},
		{"other name", []net.IP{net.IPv4(192, 0, 2, 1)}, now.Add(-time.Hour), now.Add(time.Hour), false, api.ExitUnreachable,
			"the certificate of the API server HOST is for another name: x509: certificate is valid for 192.0.2.1, not 127.0.0.1", "Correct `server`"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cert, key := certificate(t, tt.ips, tt.from, tt.until)
			pair, err := tls.X509KeyPair(cert, key)
			if err != nil {
				t.Fatal(err)
			}
			s := httptest.NewUnstartedServer(answer(200, "{}"))
			s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
			s.Config.ErrorLog = quietLog()
			s.StartTLS()
			defer s.Close()
			ca := cert
			if tt.otherCA {
				ca, _ = certificate(t, nil, now.Add(-time.Hour), now.Add(time.Hour))
			}
			e := ask(t, time.Minute, s.URL, ca, &clientcmdapi.AuthInfo{Token: "t"})
			want := tt.want
			if strings.Contains(want, "%s") {
				want = fmt.Sprintf(want, stamp(time.Now()))
			}
			check(t, e, tt.code, want, tt.hint)
		})
	}
	t.Run("http server", func(t *testing.T) {
		s := httptest.NewServer(answer(200, "{}"))
		defer s.Close()
		e := ask(t, time.Minute, strings.Replace(s.URL, "http:", "https:", 1), nil, &clientcmdapi.AuthInfo{Token: "t"})
		check(t, e, api.ExitUnreachable, "the API server HOST does not speak TLS", "Check `server`")
	})
	t.Run("client certificate refused", func(t *testing.T) {
		s := httptest.NewUnstartedServer(answer(200, "{}"))
		s.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert}
		s.Config.ErrorLog = quietLog()
		s.StartTLS()
		defer s.Close()
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
		e := ask(t, time.Minute, s.URL, ca, &clientcmdapi.AuthInfo{Token: "t"})
		check(t, e, api.ExitCredentials, "the API server HOST rejects the TLS connection: tls: certificate required", "Is the kubeconfig's client certificate")
	})
}

// Servers that cannot be reached.
func TestExplainNamesNetworkErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // accepts in the kernel, and says nothing
	hangup := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, _ := w.(http.Hijacker).Hijack()
		conn.Close()
	}))
	defer hangup.Close()
	tests := []struct{ name, server, want, hint string }{
		{"refused", "https://" + testenv.ClosedPort(t, "tcp").String(), "the API server HOST cannot be reached: connection refused", "Does the cluster run"},
		{"silent", "https://" + l.Addr().String(), "the API server HOST did not answer in time", "Is this machine on the network"},
		{"hangs up", hangup.URL, "the API server HOST, or a proxy before it, broke the connection: EOF", "Is this machine on the network"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			timeout := 3 * time.Second // client-go repeats the request until then
			if tt.name == "silent" {
				timeout = 500 * time.Millisecond
			}
			check(t, ask(t, timeout, tt.server, nil, &clientcmdapi.AuthInfo{Token: "t"}), api.ExitUnreachable, tt.want, tt.hint)
		})
	}
	f := facts{server: "api.example", proxy: "http://proxy:3128"}
	for _, tt := range []struct {
		err  error
		code api.ExitCode
		want string
	}{
		{&net.DNSError{Err: "no such host", Name: "api.example", IsNotFound: true}, api.ExitUnreachable, "the API server api.example cannot be reached: there is no host api.example"},
		{&net.DNSError{Err: "server misbehaving", Name: "api.example"}, api.ExitUnreachable, "the API server api.example cannot be reached: resolving api.example: server misbehaving"},
		{context.Canceled, api.ExitInterrupted, "interrupted"},
		{context.DeadlineExceeded, api.ExitUnreachable, "the API server api.example did not answer in time"},
		{errors.New("something else"), api.ExitUnexpected, "something else"},
		{api.Errorf(api.ExitInstall, "said before"), api.ExitInstall, "said before"},
		{fmt.Errorf("on the way: %w", api.Errorf(api.ExitInstall, "said before")), api.ExitInstall, "on the way: said before"},
	} {
		if e := f.explain(tt.err); e.Code != tt.code || e.Message != tt.want {
			t.Errorf("%v: code %d, %q; want %d, %q", tt.err, e.Code, e.Message, tt.code, tt.want)
		}
	}
	if f.explain(nil) != nil {
		t.Error("an explanation of nothing")
	}
}

// Credential plugins, through client-go.
func TestExplainNamesPluginErrors(t *testing.T) {
	plugin := func(script string) *clientcmdapi.AuthInfo {
		file := filepath.Join(t.TempDir(), "login")
		if err := os.WriteFile(file, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
		return &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
			Command: file, Args: []string{"get-token", "my cluster"},
		}}
	}
	s := httptest.NewTLSServer(answer(401, statusJSON(401, "Unauthorized", "Unauthorized")))
	defer s.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	tests := []struct {
		name, script string
		code         api.ExitCode
		want, hint   string
	}{
		{"fails", "echo no session >&2; exit 3", api.ExitExecPlugin, "login required: the credential plugin LOGIN failed with exit code 3: no session", "Log in again with `kubevpn connect --context c` in a terminal; open connections go on."},
		{"says nonsense", "echo hello", api.ExitExecPlugin, "login required: the credential plugin LOGIN printed an invalid credential: it is not an ExecCredential", "Log in again with"},
		{"outdated credentials", `echo '{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{"token":"t"}}'`, api.ExitCredentials,
			"the API server HOST rejects the kubeconfig's credentials", "Log in again: the credentials come from `LOGIN get-token 'my cluster'`."},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			user := plugin(tt.script)
			e := ask(t, time.Minute, s.URL, ca, user)
			e.Message, e.Hint = strings.ReplaceAll(e.Message, user.Exec.Command, "LOGIN"), strings.ReplaceAll(e.Hint, user.Exec.Command, "LOGIN")
			check(t, e, tt.code, tt.want, tt.hint)
		})
	}
}

// The API server's words end up in commands that an admin copies.
func TestGrantCommandsQuoteWhatTheServerSays(t *testing.T) {
	message := "pods is forbidden: User \"x;reboot\x1b[1A\" cannot list$(reboot) resource \"pods|sh\" in API group \"\" in the namespace \"web`id`\""
	user, p, ok := parseDenial(message)
	if !ok {
		t.Fatal("no denial")
	}
	want := "kubectl create role kubevpn-list--reboot--pods-sh --namespace='web`id`' --verb='list$(reboot)' --resource='pods|sh'\n" +
		"kubectl create rolebinding kubevpn-list--reboot--pods-sh --namespace='web`id`' --role=kubevpn-list--reboot--pods-sh --user='x;reboot[1A'"
	if got := p.GrantCommands(user); got != want {
		t.Fatalf("%s\nwant\n%s", got, want)
	}
}

// Kubernetes 1.36 and later ask for the right of constrained impersonation last, and name that one.
func TestConstrainedImpersonationIsImpersonation(t *testing.T) {
	user, p, ok := parseDenial(`x is forbidden: User "dev" cannot impersonate-on:user-info:create resource "selfsubjectaccessreviews" in API group "authorization.k8s.io" at the cluster scope`)
	if want := (Permission{Verb: "impersonate", Resource: "users"}); !ok || user != "dev" || p != want {
		t.Errorf("%s may not %v, want %v", user, p, want)
	}
}

func TestBindCommandIsValidShell(t *testing.T) {
	for _, tt := range []struct{ user, want string }{
		{"dev", "kubectl create rolebinding role-dev --namespace=ns --role=role --user=dev"},
		{"Jane Doe@example.com", "kubectl create rolebinding role-jane-doe-example-com --namespace=ns --role=role --user='Jane Doe@example.com'"},
		{"system:serviceaccount:ci:bot", "kubectl create rolebinding role-bot --namespace=ns --role=role --serviceaccount=ci:bot"},
		{"", "kubectl create rolebinding role --namespace=ns --role=role --user=USER"},
	} {
		if got := BindCommand("ns", "role", tt.user); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.user, got, tt.want)
		}
	}
}

func FuzzParseDenial(f *testing.F) {
	f.Add(`pods is forbidden: User "dev" cannot list resource "pods" in API group "" in the namespace "web"`)
	f.Fuzz(func(t *testing.T, message string) {
		user, p, ok := parseDenial(message)
		if !ok {
			return
		}
		if p.Verb == "" || p.Resource == "" {
			t.Fatalf("%q %+v", user, p)
		}
		if e := forbidden(message); e.Code != api.ExitPermission {
			t.Fatal(e)
		}
	})
}
