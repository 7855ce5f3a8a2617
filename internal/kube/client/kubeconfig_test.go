package client

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/sshjump"
)

const twoContexts = `
apiVersion: v1
kind: Config
current-context: one
clusters:
- {name: lab, cluster: {server: "https://10.0.0.1:6443", certificate-authority: ca.crt}}
- {name: far, cluster: {server: "https://far.example:6443", insecure-skip-tls-verify: true}}
contexts:
- {name: one, context: {cluster: lab, user: dev, namespace: team}}
- {name: two, context: {cluster: far, user: plugin}}
- {name: broken, context: {cluster: nowhere, user: dev}}
- {name: legacy, context: {cluster: far, user: gcp}}
- {name: absent, context: {cluster: far, user: absent}}
users:
- {name: dev, user: {client-certificate: dev.crt, client-key-data: a2V5, tokenFile: token}}
- name: plugin
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: login
      args: [get-token, --cluster, far]
      env: [{name: REGION, value: kubeconfig}]
      interactiveMode: IfAvailable
      installHint: Install login from its site.
- name: absent
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-login, interactiveMode: Never, installHint: Install it.}
- {name: gcp, user: {auth-provider: {name: gcp}}}
`

// home makes a directory with the kubeconfig, its files and a plugin, and points the environment at it.
func home(t *testing.T, kubeconfig string) (dir string, environ []string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{
		".kube/config": kubeconfig, ".kube/ca.crt": "CA", ".kube/dev.crt": "CERT", ".kube/token": "TOKEN",
	} {
		if text == "" {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/login"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", dir)
	t.Setenv("KUBECONFIG", filepath.Join(dir, ".kube/config"))
	return dir, []string{"HOME=" + dir, "KUBECONFIG=" + filepath.Join(dir, ".kube/config"), "PATH=" + filepath.Join(dir, "bin"), "REGION=caller", "ZONE=a=b"}
}

func TestPrepareKeepsOnlyTheContext(t *testing.T) {
	dir, environ := home(t, twoContexts)
	p, err := Prepare(Inputs{Environ: environ})
	if err != nil {
		t.Fatal(err)
	}
	if p.Context != "one" || p.Cluster != "lab" || p.Namespace != "team" {
		t.Fatalf("%+v", p)
	}
	config, err := clientcmd.Load(p.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if len(config.Contexts) != 1 || len(config.Clusters) != 1 || len(config.AuthInfos) != 1 {
		t.Fatalf("not minified:\n%s", p.Kubeconfig)
	}
	if c := config.Clusters["lab"]; string(c.CertificateAuthorityData) != "CA" || c.CertificateAuthority != "" {
		t.Fatalf("the authority is not embedded: %+v", c)
	}
	u := config.AuthInfos["dev"]
	if string(u.ClientCertificateData) != "CERT" || string(u.ClientKeyData) != "key" {
		t.Fatalf("the certificate is not embedded: %+v", u)
	}
	if want := filepath.Join(dir, ".kube/token"); u.TokenFile != want { // it may be renewed: not embedded
		t.Fatalf("tokenFile %q, want %q", u.TokenFile, want)
	}
}

func TestPrepareResolvesThePlugin(t *testing.T) {
	dir, environ := home(t, twoContexts)
	p, err := Prepare(Inputs{Overrides: inContext("two", "mine"), Environ: environ})
	if err != nil {
		t.Fatal(err)
	}
	if p.Context != "two" || p.Cluster != "far" || p.Namespace != "mine" {
		t.Fatalf("%+v", p)
	}
	_, config, err := parse(p.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	var c *Cluster
	for range 2 { // a login changes its own copy
		if c, err = p.Load(Options{}); err != nil || !c.HasAccount(p.Kubeconfig) || c.login == nil {
			t.Fatalf("%+v, %v", c, err)
		}
	}
	e := config.ExecProvider
	plugin := filepath.Join(dir, "bin/login")
	if got, want := e.Command+" "+strings.Join(e.Args, " "), plugin+" get-token --cluster far"; got != want {
		t.Fatalf("command %q, want %q", got, want)
	}
	env := map[string]string{}
	for _, v := range (&exec.Cmd{Env: c.login.plugin.env()}).Environ() { // as the plugin sees it
		name, value, _ := strings.Cut(v, "=")
		if _, twice := env[name]; twice {
			t.Fatalf("%s is set twice", name)
		}
		env[name] = value
	}
	if env["REGION"] != "kubeconfig" || env["ZONE"] != "a=b" || env["HOME"] != dir {
		t.Fatalf("environment %v", env)
	}
	if e.InteractiveMode != clientcmdapi.IfAvailableExecInteractiveMode {
		t.Fatalf("interactive mode %q", e.InteractiveMode)
	}
}

func TestAccountIsTheSameInEveryTerminal(t *testing.T) {
	_, environ := home(t, twoContexts)
	load := func(environ []string) (Prepared, *Cluster) {
		t.Helper()
		p, err := Prepare(Inputs{Overrides: inContext("two", ""), Environ: environ})
		if err != nil {
			t.Fatal(err)
		}
		c, err := Load(p.Kubeconfig, Options{})
		if err != nil {
			t.Fatal(err)
		}
		return p, c
	}
	here, c := load(append(environ, "PWD=/one"))
	there, _ := load(append(environ, "PWD=/two", "WINDOWID=2"))
	if bytes.Equal(here.Kubeconfig, there.Kubeconfig) || !c.HasAccount(there.Kubeconfig) {
		t.Error("the same user has another account in another terminal")
	}
	for _, change := range [][2]string{
		{"value: kubeconfig", "value: other"}, {"https://far.example", "https://near.example"}, {"- far", "- near"},
	} {
		other := bytes.Replace(there.Kubeconfig, []byte(change[0]), []byte(change[1]), 1)
		if bytes.Equal(other, there.Kubeconfig) || c.HasAccount(other) {
			t.Errorf("the account is the same with %q:\n%s", change[1], other)
		}
	}
}

func TestPrepareNamesTheProblem(t *testing.T) {
	tests := []struct {
		name    string
		config  string
		in      Inputs
		code    api.ExitCode
		message string // DIR stands for the home directory
		hint    string
	}{
		{"no file", "", Inputs{}, api.ExitKubeconfig, "no kubeconfig: looked at DIR/.kube/config (no such file)", "Name one with --kubeconfig FILE or KUBECONFIG=FILE."},
		{"no such file", twoContexts, Inputs{Kubeconfig: "/no/such/file"}, api.ExitKubeconfig, "there is no kubeconfig at /no/such/file", "Give --kubeconfig the path of an existing file"},
		{"empty", "apiVersion: v1\nkind: Config\n", Inputs{}, api.ExitKubeconfig, "no kubeconfig: looked at DIR/.kube/config (names no cluster)", "Name one"},
		{"not YAML", "{", Inputs{}, api.ExitKubeconfig, "the kubeconfig DIR/.kube/config is not valid YAML: line 1: did not find expected node content", "Correct the file"},
		{"no such context", twoContexts, Inputs{Overrides: inContext("three", "")}, api.ExitKubeconfig, `the kubeconfig has no context "three"`, "It has: absent, broken, legacy, one, two"},
		{"no current context", strings.Replace(twoContexts, "current-context: one", "", 1), Inputs{}, api.ExitKubeconfig, "the kubeconfig has no current context", "Choose one with --context NAME"},
		{"no such cluster", twoContexts, Inputs{Overrides: inContext("broken", "")}, api.ExitKubeconfig, `the kubeconfig's context "broken" names the cluster "nowhere", which has no server`, "`kubectl config view --context broken --minify` shows it."},
		{"auth-provider", twoContexts, Inputs{Overrides: inContext("legacy", "")}, api.ExitKubeconfig, `the kubeconfig uses the auth-provider "gcp", which Kubernetes removed in 1.26`, "Fetch a new kubeconfig"},
		{"no such plugin", twoContexts, Inputs{Overrides: inContext("absent", "")}, api.ExitExecPlugin, "the kubeconfig's credential plugin no-such-login: executable file not found in $PATH", "Install it."},
		{"no certificate", strings.Replace(twoContexts, "dev.crt", "gone.crt", 1), Inputs{}, api.ExitKubeconfig, "cannot read a file that the kubeconfig names: open DIR/.kube/gone.crt:", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir, environ := home(t, tt.config)
			tt.in.Environ = environ
			_, err := Prepare(tt.in)
			var e *api.Error
			if !errors.As(err, &e) {
				t.Fatalf("%v", err)
			}
			message := strings.ReplaceAll(e.Message, dir, "DIR")
			if e.Code != tt.code || !strings.HasPrefix(message, tt.message) || !strings.HasPrefix(e.Hint, tt.hint) {
				t.Fatalf("code %d, %q, hint %q; want %d, %q, %q", e.Code, message, e.Hint, tt.code, tt.message, tt.hint)
			}
		})
	}
}

// The daemon has another environment, so the kubeconfig must contain the proxy of the caller's environment.
func TestPrepareStoresTheProxy(t *testing.T) {
	tests := []struct {
		name    string
		environ []string
		want    string
	}{
		{"none", nil, ""},
		{"https", []string{"HTTPS_PROXY=http://proxy:3128"}, "http://proxy:3128"},
		{"lower case", []string{"https_proxy=http://proxy:3128"}, "http://proxy:3128"},
		{"socks", []string{"HTTPS_PROXY=socks5://proxy:1080"}, "socks5://proxy:1080"},
		{"not for http", []string{"HTTP_PROXY=http://proxy:3128"}, ""},
		{"excepted", []string{"HTTPS_PROXY=http://proxy:3128", "NO_PROXY=10.0.0.0/8"}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, environ := home(t, twoContexts)
			p, err := Prepare(Inputs{Environ: append(environ, tt.environ...)})
			if err != nil {
				t.Fatal(err)
			}
			config, err := clientcmd.Load(p.Kubeconfig)
			if err != nil {
				t.Fatal(err)
			}
			if got := config.Clusters["lab"].ProxyURL; got != tt.want {
				t.Fatalf("proxy %q, want %q", got, tt.want)
			}
		})
	}
}

func TestPrepareDoesNotPrintTheProxysPassword(t *testing.T) {
	tests := []struct {
		name    string
		environ []string
		proxy   string // --proxy-url
		message string // a part of it; "": success
	}{
		{"environment", []string{"HTTPS_PROXY=http://dev:s3%ret@proxy:3128"}, "", "is not a URL: http://xxxxx@proxy:3128"},
		{"space", []string{"HTTPS_PROXY=http://dev:s3 %ret@proxy:3128"}, "", "is not a URL"},
		{"excepted", []string{"HTTPS_PROXY=http://dev:s3%ret@proxy:3128", "NO_PROXY=10.0.0.1"}, "", ""},
		{"not for https", []string{"HTTP_PROXY=http://dev:s3%ret@proxy:3128"}, "", ""},
		{"flag", nil, "http://dev:s3%ret@proxy:3128", `"http://xxxxx@proxy:3128"`},
		{"scheme", nil, "ftp://dev:s3%25ret@proxy:3128", `"ftp://xxxxx@proxy:3128"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, environ := home(t, twoContexts)
			in := Inputs{Environ: append(environ, tt.environ...)}
			in.Overrides.ClusterInfo.ProxyURL = tt.proxy
			_, err := Prepare(in)
			e := api.AsError(err)
			if tt.message == "" {
				if e != nil {
					t.Error(e)
				}
				return
			}
			if e == nil || !strings.Contains(e.Message, tt.message) || strings.Contains(e.Message+e.Hint, "ret") {
				t.Errorf("%v", e)
			}
		})
	}
}

// The daemon connects through the same jump hosts, with the ssh program and the environment of the caller. Commands of
// other terminals use its connection.
func TestPrepareStoresTheJumpHosts(t *testing.T) {
	dir, environ := home(t, `
apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: lab, cluster: {server: "https://10.0.0.1:6443"}}]
contexts: [{name: lab, context: {cluster: lab, user: dev}}]
users: [{name: dev, user: {token: t}}]
`)
	bin := filepath.Join(dir, "ssh-bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	in := Inputs{
		Environ: append(environ, "PATH="+bin, "SSH_AUTH_SOCK=/agent", "HTTPS_PROXY=http://proxy:3128"),
		Jump:    Jump{Hosts: sshjump.Hosts{{User: "dev", Name: "one"}, {Name: "two", Port: 22}}, Dir: dir},
	}
	_, err := Prepare(in)
	if e := api.AsError(err); e == nil || e.Code != api.ExitUsage || !strings.Contains(e.Message, "--ssh-jump needs the program ssh") {
		t.Fatalf("without ssh: %v", err)
	}
	if err := os.WriteFile(filepath.Join(bin, "ssh"), []byte("#!/bin/sh\nexit 255\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	with, err := Prepare(in)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{filepath.Join(bin, "ssh"), "SSH_AUTH_SOCK=/agent"} {
		if !strings.Contains(string(with.Kubeconfig), part) {
			t.Errorf("the kubeconfig lacks %s:\n%s", part, with.Kubeconfig)
		}
	}
	c, err := Load(with.Kubeconfig, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.dial.jump.Hosts().String(); got != "dev@one,two:22" {
		t.Errorf("hosts %q", got)
	}
	config, err := clientcmd.Load(with.Kubeconfig)
	if err != nil || config.Clusters["lab"].ProxyURL != "" {
		t.Errorf("a proxy, %v", err)
	}
	_, err = c.DialContext(t.Context(), "tcp", "10.0.0.1:6443")
	if e := c.Explain(err); e == nil || e.Code != api.ExitUnreachable || !strings.Contains(e.Hint, "`ssh -J dev@one -p 22 -- two` must log in") {
		t.Errorf("%v", err)
	}

	if same, err := with.Load(Options{}); err != nil || same.ids != c.ids || !same.HasAccount(with.Kubeconfig) || same.dial.jump == nil {
		t.Errorf("the process that prepared the kubeconfig has another cluster: %+v, %v", same, err)
	}
	in.Environ, in.Jump = environ, Jump{}
	without, err := Prepare(in)
	if err != nil || !c.HasAccount(without.Kubeconfig) {
		t.Errorf("another account without the jump hosts, %v", err)
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(twoContexts))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, kubeconfig []byte) {
		c, err := Load(kubeconfig, Options{})
		if err == nil && len(c.ID()) != 12 {
			t.Fatalf("ID %q", c.ID())
		}
		var e *api.Error
		if err != nil && !errors.As(err, &e) {
			t.Fatalf("%T: %v", err, err)
		}
	})
}

// A pod without a kubeconfig has its service account, whose token the kubelet renews.
func TestPodUsesItsServiceAccount(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"token": "T", "ca.crt": "CA", "namespace": "team\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
	config := inCluster(env, dir)
	if config == nil {
		t.Fatal("no configuration")
	}
	c, err := clientcmd.NewDefaultClientConfig(*config, nil).ClientConfig()
	if err != nil || c.Host != "https://[fd00::1]:443" || c.BearerTokenFile != filepath.Join(dir, "token") || c.CAFile != filepath.Join(dir, "ca.crt") {
		t.Errorf("got %+v, %v", c, err)
	}
	if ns := config.Contexts[config.CurrentContext].Namespace; ns != "team" {
		t.Errorf("the namespace is %q", ns)
	}
	if inCluster(map[string]string{}, dir) != nil || inCluster(env, t.TempDir()) != nil {
		t.Error("a configuration outside of a pod")
	}
}

func TestPrepareReadsStandardInput(t *testing.T) {
	dir, environ := home(t, twoContexts)
	t.Chdir(filepath.Join(dir, ".kube"))
	in := Inputs{Kubeconfig: "-", Stdin: strings.NewReader(twoContexts), Environ: environ}
	p, err := Prepare(in)
	if err != nil || p.Context != "one" || p.Namespace != "team" || !bytes.Contains(p.Kubeconfig, []byte("certificate-authority-data: Q0E=")) {
		t.Errorf("got %s: %s, %v", p.Context, p.Kubeconfig, err)
	}
	for text, want := range map[string]string{"": "names no cluster", "x: [": "the kubeconfig of the standard input"} {
		in.Stdin = strings.NewReader(text)
		e := new(api.Error)
		if _, err := Prepare(in); !errors.As(err, &e) || e.Code != api.ExitKubeconfig || !strings.Contains(e.Message, want) || e.Hint == "" {
			t.Errorf("%q: got %v", text, err)
		}
	}
}
