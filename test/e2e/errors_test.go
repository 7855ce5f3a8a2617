//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// failure describes how a command must fail.
type failure struct {
	code    api.ExitCode
	message string        // a regular expression for the line that begins with "Error: "
	hint    string        // a regular expression for the lines below it; empty: the line itself says what to do
	within  time.Duration // 0: 5 s
}

// trace matches internals that no user should see.
var trace = regexp.MustCompile(`goroutine \d+|panic:|\.go:\d+|runtime error|%!|<nil>`)

// check fails the test unless the command failed as described: with this exit code, one error line, the next step
// indented below it, and nothing else on standard output.
func (f failure) check(t *testing.T, r result) {
	t.Helper()
	complain := func(format string, args ...any) {
		t.Helper()
		t.Errorf("%s\n%v", fmt.Sprintf(format, args...), r)
	}
	if r.code != int(f.code) {
		complain("exit code %d, want %d", r.code, f.code)
	}
	if r.stdout != "" {
		complain("the failed command prints a result on standard output")
	}
	if m := trace.FindString(r.stdout + r.stderr); m != "" {
		complain("the error shows internals: %q", m)
	}
	_, text, found := strings.Cut("\n"+r.stderr, "\nError: ")
	message, hint, _ := strings.Cut(text, "\n")
	if !found || !regexp.MustCompile(f.message).MatchString(message) {
		complain("no line `Error: ...` that matches %q", f.message)
	}
	for line := range strings.Lines(hint) {
		if !strings.HasPrefix(line, "  ") {
			complain("%q follows the error and is not indented", line)
		}
	}
	if (hint == "" && f.hint != "") || !regexp.MustCompile(f.hint).MatchString(hint) {
		complain("no next step that matches %q", f.hint)
	}
	// A command that waits for something that never comes takes longer still.
	if limit := max(f.within, 5*time.Second) + 20*time.Second; r.took > limit {
		complain("it took more than %v", limit)
	}
}

// newUser is newLaptop with a short home path, because the path of a socket is limited and names of subtests are long.
func (w *world) newUser(t *testing.T, user string) *laptop {
	t.Helper()
	home, err := os.MkdirTemp("", "kubevpn-e2e-home-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(home); err != nil {
			t.Error(err)
		}
	})
	l := w.newLaptop(t, user)
	l.home = home
	return l
}

// variant writes a changed copy of the laptop's kubeconfig and returns its path. The daemon treats it as another
// cluster, because it keeps one connection for each cluster, whatever the credentials.
func (l *laptop) variant(t *testing.T, change func(*clientcmdapi.Cluster, *clientcmdapi.AuthInfo)) string {
	t.Helper()
	c, err := clientcmd.LoadFromFile(l.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	kctx := c.Contexts[c.CurrentContext]
	cluster, user := c.Clusters[kctx.Cluster], c.AuthInfos[kctx.AuthInfo]
	// TLS ignores white space after a certificate.
	cluster.CertificateAuthorityData = append(cluster.CertificateAuthorityData, []byte(strings.Repeat("\n", 1+int(time.Now().UnixNano()%9973)))...)
	change(cluster, user)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// errorsSuite checks that each failure soon gives one line with a next step and the documented exit code, and leaves
// nothing.
func errorsSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)
	nothingLeft := func(t *testing.T) {
		t.Helper()
		l.sameAs(t, before)
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("connections: %+v", s.Connections)
		}
	}

	t.Run("usage", func(t *testing.T) { usageErrors(t, l) })
	t.Run("kubeconfig", func(t *testing.T) { kubeconfigErrors(t, l) })
	t.Run("credentials", func(t *testing.T) { credentialErrors(t, l) })
	t.Run("API server that does not answer", func(t *testing.T) { // each takes its ten seconds
		t.Run("server", func(t *testing.T) { t.Parallel(); serverErrors(t, l) })
		t.Run("plugin", func(t *testing.T) { t.Parallel(); pluginErrors(t, l) })
	})
	t.Run("permission", func(t *testing.T) { permissionErrors(t, l) })
	nothingLeft(t)
	t.Run("image", func(t *testing.T) { imageErrors(t, l, nothingLeft) })
	t.Run("tun", func(t *testing.T) { tunErrors(t, l, nothingLeft) })
}

func usageErrors(t *testing.T, l *laptop) {
	for _, tt := range []struct {
		args []string
		failure
	}{
		{[]string{"conect"}, failure{message: `unknown command "conect"`, hint: "kubevpn connect"}},
		{[]string{"connect", "--netstak", "gvisor"}, failure{message: "netstak", hint: "did you mean --netstack"}},
		{[]string{"connect", "--netstack", "kernel"}, failure{message: `netstack.*"kernel" is invalid: must be one of auto, gvisor, system`}},
		{[]string{"connect", "--scheduler", "wrr"}, failure{message: `scheduler.*"wrr" is invalid: must be one of rr, lc, sh, random`}},
		{[]string{"connect", "--extra-cidr", "10.0.0.0/33"}, failure{message: `extra-cidr.*"10.0.0.0/33" is not a network; write it like`}},
		{[]string{"connect", "production"}, failure{message: `accepts no arguments, but got "production"`, hint: "--help"}},
		{[]string{"status", "-o", "xml"}, failure{message: "xml.*table, wide, json, yaml", hint: "."}},
	} {
		t.Run(strings.Join(tt.args, "_"), func(t *testing.T) {
			tt.code = api.ExitUsage
			tt.check(t, l.run(t, append([]string{"kubevpn"}, tt.args...)...))
		})
	}
	t.Run("variable", func(t *testing.T) {
		r := l.run(t, "env", "KUBEVPN_SCHEDULER=wrr", filepath.Join(bin, "kubevpn"), "connect")
		failure{code: api.ExitUsage, message: `KUBEVPN_SCHEDULER: "wrr" is invalid: must be one of rr`}.check(t, r)
	})
}

func kubeconfigErrors(t *testing.T, l *laptop) {
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("\x00\x01 this: [is not\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	none := *l
	none.kubeconfig = ""
	for _, tt := range []struct {
		name string
		l    *laptop
		args []string
		failure
	}{
		{"none", &none, nil, failure{message: `^no kubeconfig: looked at .*\.kube/config \(no such file\)`, hint: "--kubeconfig FILE or KUBECONFIG=FILE"}},
		{"no_such_file", l, []string{"--kubeconfig", "/nosuch"}, failure{message: "there is no kubeconfig at /nosuch", hint: "--kubeconfig"}},
		{"empty", l, []string{"--kubeconfig", empty}, failure{message: "names no cluster", hint: "KUBECONFIG"}},
		{"garbage", l, []string{"--kubeconfig", garbage}, failure{message: "the kubeconfig .*garbage ", hint: "kubectl config view"}},
		{"unknown_context", l, []string{"--context", "production"}, failure{message: `no context "production"`, hint: "It has: " + l.Config().Name}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.code = api.ExitKubeconfig
			tt.check(t, tt.l.run(t, append([]string{"kubevpn", "connect"}, tt.args...)...))
		})
	}
}

// serverErrors uses API server addresses where nothing listens, nothing answers, or another server answers.
func serverErrors(t *testing.T, l *laptop) {
	node := l.Config().Families()[0].Node(1).String()
	silent := l.Config().Families()[0].Node(200).String()
	l.drop(t, "ip daddr "+silent)
	for _, tt := range []struct {
		name, server string
		failure
	}{
		{"closed_port", "https://" + node + ":9", failure{message: regexp.QuoteMeta(node) + ":9 cannot be reached: connection refused", hint: "Does the cluster run"}},
		{"black_hole", "https://" + silent + ":6443", failure{message: regexp.QuoteMeta(silent) + ":6443 did not answer in time", hint: "network", within: 16 * time.Second}},
		{"no_such_host", "https://nosuch.outside.test:6443", failure{message: "there is no host nosuch.outside.test", hint: "network"}},
		{"no_tls", "https://www.outside.test:80", failure{message: "does not speak TLS", hint: "server"}},
		{"another_cluster", "", failure{message: "certificate that the kubeconfig's authority did not sign", hint: "Fetch the kubeconfig again"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			kubeconfig := l.variant(t, func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
				if tt.server == "" {
					_, c.CertificateAuthorityData = selfSigned(t, "another CA")
					return
				}
				c.Server = tt.server
			})
			tt.code = api.ExitUnreachable
			tt.check(t, l.run(t, "kubevpn", "connect", "--kubeconfig", kubeconfig))
		})
	}
}

// credentialErrors uses tokens and certificates that the API server does not accept, or no longer accepts.
func credentialErrors(t *testing.T, l *laptop) {
	key, certificate := selfSigned(t, "dev")
	for _, tt := range []struct {
		name   string
		change func(*clientcmdapi.AuthInfo)
		failure
	}{
		{"unknown_token", func(u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: "nobody-knows-me"} },
			failure{message: "rejects the kubeconfig's credentials", hint: "Log in again"}},
		{"expired_token", func(u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: l.expiredToken(t)} },
			failure{message: `rejects the kubeconfig's credentials: the token expired (1h|60m)\S* ago`, hint: "Log in again"}},
		{"unknown_certificate", func(u *clientcmdapi.AuthInfo) {
			*u = clientcmdapi.AuthInfo{ClientKeyData: key, ClientCertificateData: certificate}
		}, failure{message: "reject|does not know you", hint: "[Ff]etch the kubeconfig"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			kubeconfig := l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { tt.change(u) })
			tt.code = api.ExitCredentials
			tt.check(t, l.run(t, "kubevpn", "connect", "--kubeconfig", kubeconfig))
		})
	}
}

// expiredToken returns a token of the developer's ServiceAccount, signed by the cluster, that expired an hour ago.
func (l *laptop) expiredToken(t *testing.T) string {
	t.Helper()
	header, rest, _ := strings.Cut(l.kubectl(t, "create", "token", "developer"), ".")
	payload, _, _ := strings.Cut(rest, ".")
	text, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		t.Fatal(err)
	}
	var claims map[string]any
	if err := json.Unmarshal(text, &claims); err != nil {
		t.Fatal(err)
	}
	claims["exp"] = time.Now().Add(-time.Hour).Unix()
	claims["iat"] = time.Now().Add(-2 * time.Hour).Unix()
	claims["nbf"] = claims["iat"]
	if text, err = json.Marshal(claims); err != nil {
		t.Fatal(err)
	}
	signed := header + "." + base64.RawURLEncoding.EncodeToString(text)
	file, err := os.ReadFile(filepath.Join(l.Dir(), "pki", "sa.key"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(file)
	digest := sha256.Sum256([]byte(signed))
	var signature []byte
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		signature, err = rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, digest[:])
		if err != nil {
			t.Fatal(err)
		}
	} else {
		signature = ecSignature(t, block.Bytes, digest[:])
	}
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// ecSignature converts an ECDSA signature to the format of ES256 (RFC 7518, 3.4).
func ecSignature(t *testing.T, der, digest []byte) []byte {
	t.Helper()
	key, err := x509.ParseECPrivateKey(der)
	if err != nil {
		parsed, pkcs8 := x509.ParsePKCS8PrivateKey(der)
		if key, _ = parsed.(*ecdsa.PrivateKey); key == nil {
			t.Fatal(errors.Join(err, pkcs8))
		}
	}
	r, s, err := ecdsa.Sign(rand.Reader, key, digest)
	if err != nil {
		t.Fatal(err)
	}
	return append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
}

// selfSigned returns an untrusted certificate and its key, both in PEM.
func selfSigned(t *testing.T, name string) (key, certificate []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
}

// pluginErrors uses credential plugins that fail, hang with a child process, or are missing.
func pluginErrors(t *testing.T, l *laptop) {
	dir := t.TempDir()
	script := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	pids := filepath.Join(dir, "pids")
	for _, tt := range []struct {
		name, command string
		failure
	}{
		{"plugin_fails", script("failing-login", "echo 'session over' >&2\nexit 3\n"),
			failure{message: "failing-login failed with exit code 3: session over", hint: "failing-login"}},
		{"plugin_hangs", script("hanging-login", "sleep 600 &\necho $$ $! >"+pids+"\nwait\n"),
			failure{message: "hanging-login did not answer within 10s and was killed", hint: "hanging-login", within: 13 * time.Second}},
		{"missing", "missing-login", failure{message: "credential plugin missing-login: .*not found", hint: "PATH"}},
		{"plugin_prints_invalid_output", script("nonsense-login", "echo 'welcome!'\n"),
			failure{message: "nonsense-login printed an invalid credential", hint: "nonsense-login"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			kubeconfig := l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
				*u = clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
					APIVersion: "client.authentication.k8s.io/v1", Command: tt.command, InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
				}}
			})
			tt.code = api.ExitExecPlugin
			tt.check(t, l.run(t, "kubevpn", "connect", "--kubeconfig", kubeconfig))
		})
	}
	t.Run("no_process_of_the_plugin_is_left", func(t *testing.T) {
		text, err := os.ReadFile(pids)
		if err != nil {
			t.Fatal(err)
		}
		for field := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, soon, func() error {
				if err := syscall.Kill(pid, 0); err == nil {
					return fmt.Errorf("process %d of the plugin is still running", pid)
				}
				return nil
			})
		}
	})
}

// permissionErrors checks that the message names the verb, the resource and the permission to ask for.
func permissionErrors(t *testing.T, l *laptop) {
	l.kubectl(t, "create", "serviceaccount", "powerless")
	t.Cleanup(func() {
		if _, err := l.tryKubectl(context.WithoutCancel(t.Context()), "delete", "serviceaccount", "powerless"); err != nil {
			t.Error(err)
		}
	})
	token := l.kubectl(t, "create", "token", "powerless")
	powerless := l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: token} })

	t.Run("no_permission_at_all", func(t *testing.T) {
		r := l.run(t, "kubevpn", "connect", "--kubeconfig", powerless)
		failure{code: api.ExitPermission, message: `neither in the namespace kubevpn .* nor in default`, hint: `admin(.|\n)*kubevpn install(.|\n)*--serviceaccount=default:powerless(.|\n)* in default: (get|create) deployments`}.check(t, r)
	})
	t.Run("no_permission_in_the_manager_namespace", func(t *testing.T) {
		dev := l.newUser(t, lab.Developer)
		r := dev.run(t, "kubevpn", "connect", "--manager-namespace", "kube-system")
		failure{code: api.ExitPermission, message: `may not .*right to \w+ \S+ in namespace kube-system`, hint: "admin"}.check(t, r)
	})
	t.Run("no_permission_to_port_forward", func(t *testing.T) {
		l.apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: looker, namespace: default}
rules:
- {apiGroups: ["", apps], resources: [pods, services, deployments, serviceaccounts, replicasets, events], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: looker, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: looker}
subjects: [{kind: ServiceAccount, name: powerless, namespace: default}]
`)
		r := l.run(t, "kubevpn", "connect", "--kubeconfig", powerless, "--manager-namespace", "default")
		failure{
			code: api.ExitPermission, message: `may not .*right to create pods/portforward in namespace default`,
			hint: `kubectl create rolebinding .*--serviceaccount=default:powerless`, within: 10 * time.Second,
		}.check(t, r)
	})
	t.Run("json_output_contains_the_error", func(t *testing.T) {
		r := l.run(t, "kubevpn", "connect", "-o", "json", "--kubeconfig", powerless, "--manager-namespace", "kube-system")
		lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
		var last api.Event
		d := json.NewDecoder(bytes.NewBufferString(lines[len(lines)-1]))
		if err := d.Decode(&last); err != nil || last.Error == nil || last.Error.Code != api.ExitPermission || last.Error.Hint == "" || r.code != int(api.ExitPermission) {
			t.Errorf("the last line does not contain the error (%v):\n%v", err, r)
		}
	})
}

// imageErrors checks that the message soon gives the pod's own reason, and that a good image repairs the installation.
func imageErrors(t *testing.T, l *laptop, nothingLeft func(*testing.T)) {
	const ns = "e2e-image"
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if r := l.runContext(ctx, t, "kubevpn", "uninstall", "--manager-namespace", ns); r.code != 0 {
			t.Error(r)
		}
	})
	r := l.run(t, "kubevpn", "connect", "--manager-namespace", ns, "--image", "docker.io/kubevpn/nosuch:1")
	failure{
		code: api.ExitImagePull, message: `docker\.io/kubevpn/nosuch:1.*(failed to|no such host|not found)`, hint: "--image", within: 20 * time.Second,
	}.check(t, r)
	t.Logf("reported after %v", r.took.Round(time.Millisecond))
	nothingLeft(t)
	t.Run("image_is_pulled_again_at_once", func(t *testing.T) { pulledAgain(t, l, ns) })
	good := l.run(t, "kubevpn", "connect", "--manager-namespace", ns)
	if good.code != 0 {
		t.Fatal(good)
	}
	t.Logf("repaired after %v", good.took.Round(time.Millisecond))
	if c := l.connection(t); c.ManagerNamespace != ns || c.Status != api.StatusConnected {
		t.Errorf("%+v", c)
	}
	l.must(t, "kubevpn", "disconnect", "--all")
}

// pulledAgain checks that the next attempt does not wait for the kubelet's backoff once the image exists.
func pulledAgain(t *testing.T, l *laptop, ns string) {
	const late = "docker.io/kubevpn/late:1"
	if r := l.run(t, "kubevpn", "connect", "--manager-namespace", ns, "--image", late); r.code != int(api.ExitImagePull) {
		t.Fatal(r)
	}
	testenv.Eventually(t, 90*time.Second, func() error { // after the second attempt the kubelet waits for 20 s
		out, err := l.tryKubectl(t.Context(), "-n", ns, "get", "events", "-o",
			`jsonpath={range .items[?(@.reason=="Pulling")]}{.message} {.count};{end}`)
		if err == nil && !regexp.MustCompile(regexp.QuoteMeta(late)+`" [2-9];`).MatchString(out) {
			return fmt.Errorf("attempts: %s", out)
		}
		return err
	})
	l.loadVersion(t, late, "")
	r := l.connect(t, "--manager-namespace", ns, "--image", late)
	if r.took > 10*time.Second {
		t.Errorf("connect waited for the kubelet: %v", r)
	}
	t.Logf("pulled again after %v", r.took.Round(time.Millisecond))
	l.must(t, "kubevpn", "disconnect", "--all")
}

// tunErrors checks the messages when there is no usable TUN device.
func tunErrors(t *testing.T, l *laptop, nothingLeft func(*testing.T)) {
	for _, tt := range []struct{ name, hide string }{
		{"missing", "mount -t tmpfs none /dev/net"},
		{"not_a_tun", "mount --bind /dev/null /dev/net/tun"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := l.run(t, "unshare", "-m", "sh", "-c", tt.hide+` && exec "$0" connect`, filepath.Join(bin, "kubevpn"))
			failure{code: api.ExitNoTUN, message: "/dev/net/tun", hint: "modprobe tun|--device /dev/net/tun", within: 20 * time.Second}.check(t, r)
			nothingLeft(t)
		})
	}
}

// drop makes the router drop forwarded packets that match one of the rules, until heal is called or the test ends.
func (w *world) drop(t *testing.T, matches ...string) (heal func()) {
	t.Helper()
	for i := range matches {
		matches[i] += " drop"
	}
	return w.nft(t, "router", "forward", matches...)
}

// nft adds rules at a place of the lab, until the test ends or heal is called.
func (w *world) nft(t *testing.T, place, hook string, rules ...string) (heal func()) {
	t.Helper()
	table := "e2e" + strconv.FormatInt(time.Now().UnixNano(), 36)
	nft := func(ctx context.Context, text string) error {
		cmd, err := w.Command(ctx, place, "nft", "-f", "-")
		if err != nil {
			return err
		}
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		return nil
	}
	err := nft(t.Context(), "table inet "+table+" { chain c { type filter hook "+hook+" priority -10; "+strings.Join(rules, "; ")+"; }; }")
	if err != nil {
		t.Fatal(err)
	}
	healed := false
	heal = func() {
		if healed {
			return
		}
		healed = true
		if err := nft(context.WithoutCancel(t.Context()), "delete table inet "+table); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(heal)
	return heal
}
