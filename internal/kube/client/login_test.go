//go:build unix

package client

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// knows is an API server that knows the users with these tokens.
func knows(tokens ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, token := range tokens {
			if r.Header.Get("Authorization") == "Bearer "+token {
				answer(201, review).ServeHTTP(w, r)
				return
			}
		}
		answer(401, statusJSON(401, "Unauthorized", "Unauthorized")).ServeHTTP(w, r)
	})
}

// pluginUser is a user whose credential plugin is a script, which counts its runs in the file that it returns.
func pluginUser(t *testing.T, script string) (*clientcmdapi.AuthInfo, string) {
	t.Helper()
	dir := t.TempDir()
	runs := filepath.Join(dir, "runs")
	if err := os.WriteFile(filepath.Join(dir, "login"), []byte("#!/bin/sh\necho x >> "+runs+"\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
		APIVersion: credentialV1, InteractiveMode: clientcmdapi.IfAvailableExecInteractiveMode, Command: filepath.Join(dir, "login"),
	}}, runs
}

func count(t *testing.T, runs string) int {
	t.Helper()
	text, err := os.ReadFile(runs)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Count(string(text), "x")
}

func TestCredentialIsUsedUntilItExpires(t *testing.T) {
	s := httptest.NewTLSServer(knows("handed", "refreshed"))
	defer s.Close()
	user, runs := pluginUser(t, "echo '"+answered("refreshed")+"'")
	c := clusterAt(t, serverOf(s), user, Options{Credential: &api.Credential{Token: "handed", Expires: time.Now().Add(time.Hour)}})
	if err := c.Reach(t.Context()); err != nil || count(t, runs) != 0 {
		t.Fatalf("%v after %d runs of the plugin", err, count(t, runs))
	}
	if err := c.SetCredential(&api.Credential{Token: "handed", Expires: time.Now().Add(-time.Second)}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.Reach(t.Context()); err != nil || count(t, runs) != 1 {
			t.Fatalf("%v after %d runs of the plugin", err, count(t, runs))
		}
	}
}

func TestRejectedCredentialIsRenewed(t *testing.T) {
	s := httptest.NewTLSServer(knows("refreshed"))
	defer s.Close()
	user, runs := pluginUser(t, "echo '"+answered("refreshed")+"'")
	c := clusterAt(t, serverOf(s), user, Options{Credential: &api.Credential{Token: "revoked"}})
	if e := api.AsError(c.Reach(t.Context())); e == nil || e.Code != api.ExitCredentials {
		t.Fatalf("%v", e)
	}
	if err := c.Reach(t.Context()); err != nil || count(t, runs) != 1 {
		t.Fatalf("%v after %d runs of the plugin", err, count(t, runs))
	}
}

// If the plugin needs a person, requests fail without running it again until the CLI hands over a credential.
func TestLoginIsRequiredUntilACredentialComes(t *testing.T) {
	s := httptest.NewTLSServer(knows("handed", "fresh"))
	defer s.Close()
	user, runs := pluginUser(t, "echo 'no session' >&2; exit 1")
	c := clusterAt(t, serverOf(s), user, Options{Credential: &api.Credential{Token: "handed", Expires: time.Now().Add(-time.Second)}})
	shared := clusterAt(t, serverOf(s), user, Options{LoginOf: c})
	if e := c.LoginRequired(); e != nil {
		t.Fatal(e)
	}
	want := "login required: the credential plugin " + user.Exec.Command + " failed with exit code 1: no session"
	for range 3 {
		if e := api.AsError(c.Reach(t.Context())); e == nil || e.Message != want || e.Code != api.ExitExecPlugin {
			t.Fatalf("%v, want %s", e, want)
		}
	}
	if n := count(t, runs); n != 1 {
		t.Fatalf("the plugin ran %d times", n)
	}
	if e := shared.LoginRequired(); e == nil || e.Message != want {
		t.Fatalf("%v", e)
	}
	if err := c.SetCredential(&api.Credential{Token: "fresh"}); err != nil {
		t.Fatal(err)
	}
	if err := shared.Reach(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e := c.LoginRequired(); e != nil {
		t.Fatal(e)
	}
}

// A client certificate authenticates the connection that it began: another one needs another connection.
func TestFreshCertificateReplacesTheOldOne(t *testing.T) {
	var seen []string
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r.TLS.PeerCertificates[0].NotAfter.UTC().Format("2006"))
		answer(201, review).ServeHTTP(w, r)
	}))
	s.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	s.EnableHTTP2 = true
	s.Config.ErrorLog = quietLog()
	s.StartTLS()
	defer s.Close()
	credential := func(year int) *api.Credential {
		cert, key := certificate(t, nil, time.Now().Add(-time.Hour), time.Date(year, 7, 1, 0, 0, 0, 0, time.UTC))
		return &api.Credential{Certificate: string(cert), Key: string(key)}
	}
	user, _ := pluginUser(t, "exit 1")
	c := clusterAt(t, serverOf(s), user, Options{Credential: credential(2091)})
	for range 2 {
		if err := c.Reach(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.SetCredential(credential(2092)); err != nil {
		t.Fatal(err)
	}
	// The transport learns in a goroutine of its own that the old connection is closed, so a request may still meet it.
	testenv.Eventually(t, 10*time.Second, func() error { return c.Reach(t.Context()) })
	if got := fmt.Sprint(seen); got != "[2091 2091 2092]" {
		t.Fatalf("the server saw certificates that end in %s", got)
	}
}

func TestCredentialHidesItself(t *testing.T) {
	c := &api.Credential{Token: "secret", Key: "secret"}
	if text := fmt.Sprintf("%v %+v %#v %s", c, *c, *c, c); strings.Contains(text, "secret") {
		t.Fatal(text)
	}
}
