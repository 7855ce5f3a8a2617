//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// loginSuite uses a credential plugin that needs a login in the middle of a connection. Flows wait and continue,
// status tells the user what to do, and `kubevpn connect` does it.
func loginSuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	before := l.snapshot(t)
	plugin := loginPlugin{t.TempDir()}
	l.kubeconfig = l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { plugin.become(t, u) })
	l.connect(t)
	id := l.connection(t).ID
	f := l.startFlow(t, net.JoinHostPort(w.clusterIP(t, "default", "web"), "9001"))
	f.goesOn(t, soon)

	plugin.needsPerson(t, true)
	if err := w.Kill(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	restart := sync.OnceValue(func() error { return w.Restart(context.WithoutCancel(t.Context()), "kube-apiserver") })
	t.Cleanup(func() { // runs after a failure too
		if err := restart(); err != nil {
			t.Error(err)
		}
	})
	testenv.Eventually(t, time.Minute, func() error {
		if c := l.connection(t); c.Error == nil || !strings.Contains(c.Error.Message, "login required") || !strings.Contains(c.Error.Hint, "kubevpn connect") {
			return fmt.Errorf("status %s: %v", c.Status, c.Error)
		}
		return nil
	})
	if err := restart(); err != nil {
		t.Fatal(err)
	}

	plugin.needsPerson(t, false)
	testenv.Eventually(t, 40*time.Second, func() error { // the API server is starting
		if r := l.run(t, "kubevpn", "connect"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	l.connectedAgain(t, 40*time.Second)
	if now := l.connection(t).ID; now != id {
		t.Errorf("connection %s became %s", id, now)
	}
	f.goesOn(t, soon)
	f.finish(t)
	l.must(t, "kubevpn", "quit")
	l.sameAs(t, before)
}

// loginPlugin is a credential plugin in its own directory. Its credentials expire after a second.
type loginPlugin struct{ dir string }

// become replaces the user's credentials with the plugin, which returns them.
func (p loginPlugin) become(t *testing.T, u *clientcmdapi.AuthInfo) {
	t.Helper()
	credential, err := json.Marshal(map[string]any{
		"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
		"status": map[string]string{
			"clientCertificateData": string(u.ClientCertificateData), "clientKeyData": string(u.ClientKeyData), "expirationTimestamp": "EXPIRES",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	command := filepath.Join(p.dir, "login")
	script := fmt.Sprintf("#!/bin/sh\ncd '%s' || exit\n"+
		"if [ -e person ]; then echo 'log in with a browser' >&2; exit 1; fi\n"+
		"sed \"s/EXPIRES/$(date -u -d '+1 second' +%%Y-%%m-%%dT%%H:%%M:%%SZ)/\" credential\n", p.dir)
	if err := os.WriteFile(filepath.Join(p.dir, "credential"), credential, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(command, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	*u = clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
		APIVersion: "client.authentication.k8s.io/v1", Command: command, InteractiveMode: clientcmdapi.IfAvailableExecInteractiveMode,
	}}
}

// needsPerson makes the plugin fail until a user has logged in.
func (p loginPlugin) needsPerson(t *testing.T, needs bool) {
	t.Helper()
	file := filepath.Join(p.dir, "person")
	err := os.Remove(file)
	if needs {
		err = os.WriteFile(file, nil, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
