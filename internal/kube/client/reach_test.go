package client

import (
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

// clusterAt is a Cluster behind a kubeconfig with that server and user.
func clusterAt(t *testing.T, server *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo, o Options) *Cluster {
	t.Helper()
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "c",
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		Clusters:       map[string]*clientcmdapi.Cluster{"c": server},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": user},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := Load(kubeconfig, o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// serverOf is a TLS server's entry in a kubeconfig.
func serverOf(s *httptest.Server) *clientcmdapi.Cluster {
	return &clientcmdapi.Cluster{Server: s.URL, CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})}
}

const review = `{"kind":"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":true}}`

func denied(user, verb, resource, group string) string {
	return statusJSON(403, "Forbidden", fmt.Sprintf(`%s is forbidden: User %q cannot %s resource %q in API group %q at the cluster scope`, resource, user, verb, resource, group))
}

func html(code int, page string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(code)
		fmt.Fprint(w, page)
	}
}

// Other servers and proxies answer instead of the API server.
func TestReachNamesTheResponder(t *testing.T) {
	reviews := denied("ann", "create", "selfsubjectaccessreviews", "authorization.k8s.io")
	for _, tt := range []struct {
		name    string
		handler http.Handler
		code    api.ExitCode
		want    string
		hint    string
	}{
		{"an API server", answer(201, review), 0, "", ""},
		{"a login page", html(200, "<html><head><title>Sign in\x1b[2J to Corp</title>"), api.ExitUnreachable,
			`the API server HOST answers with a web page titled "Sign in[2J to Corp", as the login page of a proxy does`, "Open https://HOST in a browser"},
		{"a login page that says 401", html(401, "<!doctype html><p>who are you"), api.ExitUnreachable,
			"the API server HOST answers with a web page, as the login page of a proxy does", "Open https://HOST in a browser"},
		{"a redirect to a login page", http.RedirectHandler("https://sso.example/login", 302), api.ExitUnreachable,
			"the API server HOST redirects to sso.example, as the login page of a proxy does", "Open https://HOST in a browser"},
		{"another program", answer(200, `{"hello":1}`), api.ExitUnreachable,
			"the API server HOST is not a Kubernetes API server: it did not answer like one", "Check `server`"},
		{"401", answer(401, statusJSON(401, "Unauthorized", "Unauthorized")), api.ExitCredentials,
			"the API server HOST rejects the kubeconfig's credentials: the token expired 3h ago", "Log in again"},
		{"an anonymous user", answer(403, denied("system:anonymous", "create", "selfsubjectaccessreviews", "authorization.k8s.io")), api.ExitCredentials,
			"the API server HOST does not know you: it treats the request as anonymous", "The kubeconfig has no credentials"},
		{"403 on everything", answer(403, reviews), api.ExitPermission,
			`the API server HOST knows ann, and forbids everything: selfsubjectaccessreviews is forbidden: User "ann" cannot create resource "selfsubjectaccessreviews" in API group "authorization.k8s.io" at the cluster scope`,
			"Choose another --context"},
		{"--as without the right to it", answer(403, denied("ann", "impersonate-on:user-info:create", "selfsubjectaccessreviews", "authorization.k8s.io")), api.ExitPermission,
			"ann may not impersonate users in the whole cluster", "Ask a cluster admin to run:\nkubectl create clusterrole"},
		{"403 on the review alone", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/namespaces/kubevpn/pods") {
				answer(200, `{"kind":"PodList","apiVersion":"v1","items":[]}`).ServeHTTP(w, r)
				return
			}
			answer(403, reviews).ServeHTTP(w, r)
		}), 0, "", ""},
		{"403 of a proxy", answer(403, "blocked by policy"), api.ExitPermission,
			"the API server HOST, or a proxy before it, forbids every request (403) with an answer that is not from Kubernetes", "Is this machine on the network"},
		{"a load balancer", html(502, "<html>Bad Gateway</html>"), api.ExitUnreachable,
			"the API server HOST, or a proxy before it, answers with error 502: Bad Gateway", "The cluster or a load balancer has a fault."},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := httptest.NewTLSServer(tt.handler)
			defer s.Close()
			token := "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, time.Now().Add(-3*time.Hour).Unix())) + ".sig"
			c := clusterAt(t, serverOf(s), &clientcmdapi.AuthInfo{Token: token}, Options{})
			err := c.Reach(t.Context(), "shop", "kubevpn")
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			e := api.AsError(err)
			if e == nil {
				t.Fatal("it was reached")
			}
			e.Message, e.Hint = strings.ReplaceAll(e.Message, c.server.Host, "HOST"), strings.ReplaceAll(e.Hint, c.server.Host, "HOST")
			check(t, e, tt.code, tt.want, tt.hint)
		})
	}
}

// These servers receive no request.
func TestReachNamesTheReasonForSilence(t *testing.T) {
	s := httptest.NewUnstartedServer(answer(201, review))
	s.Config.ErrorLog = quietLog()
	s.StartTLS()
	defer s.Close()
	other, _ := certificate(t, nil, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	ca := serverOf(s).CertificateAuthorityData
	plain := httptest.NewServer(answer(201, review))
	defer plain.Close()
	proxy := httptest.NewServer(answer(407, ""))
	defer proxy.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close() // accepts in the kernel, and says nothing
	for _, tt := range []struct {
		name   string
		server clientcmdapi.Cluster
		want   string
	}{
		{"a wrong CA", clientcmdapi.Cluster{Server: s.URL, CertificateAuthorityData: other}, "the API server HOST has a certificate that the kubeconfig's authority did not sign"},
		{"no TLS there", clientcmdapi.Cluster{Server: strings.Replace(plain.URL, "http:", "https:", 1)}, "the API server HOST does not speak TLS"},
		{"a proxy that wants a password", clientcmdapi.Cluster{Server: s.URL, CertificateAuthorityData: ca, ProxyURL: proxy.URL},
			"the API server HOST cannot be reached: the proxy " + proxy.URL + " answers Proxy Authentication Required (407)"},
		{"silence", clientcmdapi.Cluster{Server: "https://" + silent.Addr().String()}, "the API server HOST did not answer in time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := clusterAt(t, &tt.server, &clientcmdapi.AuthInfo{Token: "t"}, Options{})
			ctx := t.Context()
			if tt.name == "silence" {
				bounded, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
				defer cancel()
				ctx = bounded
			}
			e := api.AsError(c.Reach(ctx))
			if e == nil {
				t.Fatal("it was reached")
			}
			if got := strings.ReplaceAll(e.Message, c.server.Host, "HOST"); got != tt.want || e.Code != api.ExitUnreachable || e.Hint == "" {
				t.Fatalf("code %d, %q (%s); want %q", e.Code, got, e.Hint, tt.want)
			}
		})
	}
	t.Run("interrupted", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		c := clusterAt(t, serverOf(s), &clientcmdapi.AuthInfo{Token: "t"}, Options{})
		if err := c.Reach(ctx); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	})
}
