//go:build unix

package client

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

const preference = "apiVersion: kubectl.config.k8s.io/v1beta1\nkind: Preference\n"

// A plugin that kubectl's preferences do not allow never runs: neither on a terminal, nor in the daemon, which has
// another environment.
func TestPluginPolicyOfKubercIsEnforced(t *testing.T) {
	allow := func(command string) string {
		return preference + "credentialPluginPolicy: Allowlist\ncredentialPluginAllowlist:\n- command: " + command + "\n"
	}
	const notListed = "credentialPluginAllowlist of KUBERC does not contain it"
	for _, tt := range []struct{ name, kuberc, env, refusal, warning, err string }{
		{name: "none"},
		{name: "empty", kuberc: "\n"},
		{name: "allows all", kuberc: preference + "credentialPluginPolicy: AllowAll\n"},
		{name: "denies all", kuberc: preference + "credentialPluginPolicy: DenyAll\n", refusal: "credentialPluginPolicy is DenyAll in KUBERC"},
		{name: "denies all in another document", kuberc: "kind: Other\n---\n" + preference + "credentialPluginPolicy: DenyAll\n",
			refusal: "credentialPluginPolicy is DenyAll in KUBERC"},
		{name: "denies all in $KUBERC", kuberc: preference + "credentialPluginPolicy: DenyAll\n", env: "other",
			refusal: "credentialPluginPolicy is DenyAll in KUBERC"},
		{name: "off", kuberc: preference + "credentialPluginPolicy: DenyAll\n", env: "off"},
		{name: "lists the name", kuberc: allow("login")},
		{name: "lists the path", kuberc: allow("DIR/bin/login")},
		{name: "lists another program", kuberc: allow("aws"), refusal: notListed},
		{name: "lists the name in another folder", kuberc: allow("/usr/bin/login"), refusal: notListed},
		{name: "has an unknown field", kuberc: preference + "credentialPluginPolicy: DenyAll\nnew: 1\n",
			refusal: "credentialPluginPolicy is DenyAll in KUBERC", warning: `unknown field "new"`},
		{name: "is malformed", kuberc: "kind: [", warning: "no valid Preference"},
		{name: "is malformed in $KUBERC", kuberc: "kind: [", env: "other", err: "no valid Preference"},
		{name: "is missing in $KUBERC", env: "other", err: "no such file"},
		{name: "has an unknown policy", kuberc: preference + "credentialPluginPolicy: Never\n", err: `unknown plugin policy: "Never"`},
		{name: "has an empty list", kuberc: preference + "credentialPluginPolicy: Allowlist\ncredentialPluginAllowlist: []\n", err: "allowlist is"},
		{name: "has a list without its policy", kuberc: preference + "credentialPluginAllowlist: [{command: login}]\n", err: "misconfigured"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, environ := home(t, strings.ReplaceAll(twoContexts, "far.example:6443", "127.0.0.1:1"))
			file := filepath.Join(dir, ".kube/kuberc")
			switch tt.env {
			case "off":
				environ = append(environ, "KUBERC=off")
			case "other":
				environ = append(environ, "KUBERC="+filepath.Join(dir, "other"))
				file = filepath.Join(dir, "other")
			}
			write := func(name, text string) {
				t.Helper()
				if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if tt.kuberc != "" {
				write(file, strings.ReplaceAll(tt.kuberc, "DIR", dir))
			}
			ran := filepath.Join(dir, "ran")
			write(filepath.Join(dir, "bin/login"), "#!/bin/sh\n: > "+ran+"\necho '"+answered("x")+"'\n")
			p, err := Prepare(Inputs{Overrides: inContext("two", ""), Environ: environ})
			if tt.err != "" {
				if e := api.AsError(err); e == nil || e.Code != api.ExitExecPlugin || !strings.Contains(e.Message, tt.err) ||
					!strings.Contains(e.Message, file) {
					t.Fatalf("error %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil || !strings.Contains(p.Warning, tt.warning) || (tt.warning == "") != (p.Warning == "") {
				t.Fatalf("warning %q, error %v", p.Warning, err)
			}
			c, err := Load(p.Kubeconfig, Options{})
			if err != nil {
				t.Fatal(err)
			}
			_, background := c.Kube().CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
			if _, err := os.Stat(ran); (err == nil) != (tt.refusal == "") {
				t.Fatalf("a request of the daemon: %v, and then %v", background, err)
			}
			_, err = c.Login(t.Context(), Terminal{})
			if tt.refusal == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			want := "the credential plugin " + dir + "/bin/login is not allowed: " + strings.ReplaceAll(tt.refusal, "KUBERC", file)
			if e := api.AsError(err); e == nil || e.Code != api.ExitExecPlugin || e.Message != want {
				t.Fatalf("error %v, want %s", err, want)
			}
			if _, err := os.Stat(ran); !errors.Is(err, os.ErrNotExist) {
				t.Fatal("the plugin ran")
			}
		})
	}
}

// A kubeconfig cannot bring a verdict of its own.
func TestKubeconfigCannotAllowItsPlugin(t *testing.T) {
	dir, environ := home(t, strings.Replace(twoContexts, "- name: plugin\n  user:\n",
		"- name: plugin\n  user:\n    extensions: [{name: "+refusalExtension+", extension: \"\"}]\n", 1))
	if err := os.WriteFile(filepath.Join(dir, ".kube/kuberc"), []byte(preference+"credentialPluginPolicy: DenyAll\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Prepare(Inputs{Overrides: inContext("two", ""), Environ: environ})
	if err != nil {
		t.Fatal(err)
	}
	c, err := Load(p.Kubeconfig, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Login(t.Context(), Terminal{}); err == nil || !strings.Contains(err.Error(), "DenyAll") {
		t.Fatal(err)
	}
}
