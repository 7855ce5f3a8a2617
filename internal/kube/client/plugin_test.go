//go:build unix

package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

const credentialV1 = "client.authentication.k8s.io/v1"

// answered is an ExecCredential with a token.
func answered(token string) string {
	return fmt.Sprintf(`{"kind":"ExecCredential","apiVersion":%q,"status":{"token":%q}}`, credentialV1, token)
}

func script(text string) *plugin {
	return &plugin{timeout: time.Minute, config: &clientcmdapi.ExecConfig{
		APIVersion: credentialV1, InteractiveMode: clientcmdapi.IfAvailableExecInteractiveMode, Command: "/bin/sh", Args: []string{"-c", text},
		Env: []clientcmdapi.ExecEnvVar{{Name: "TOKEN", Value: "secret"}},
	}}
}

func TestPluginAnswerIsChecked(t *testing.T) {
	for _, tt := range []struct{ name, script, token, err string }{
		{"answers", `echo '` + strings.ReplaceAll(answered("X"), "X", `'$TOKEN'`) + `'`, "secret", ""},
		{"is told that nobody is there", `case $KUBERNETES_EXEC_INFO in *'"interactive":false'*) echo '` + answered("alone") + `';; esac`, "alone", ""},
		{"has no input", `cat; echo '` + answered("x") + `'`, "x", ""},
		{"leaves a helper behind", `sleep 30 & echo '` + answered("x") + `'`, "x", ""},
		{"fails", `echo one >&2; printf '\033[31mexpired\r\n' >&2; exit 3`, "", "the credential plugin /bin/sh failed with exit code 3: [31mexpired"},
		{"says nonsense", `echo hello`, "", "the credential plugin /bin/sh printed an invalid credential: it is not an ExecCredential"},
		{"says too much", `yes | head -c 2000000`, "", "the credential plugin /bin/sh printed an invalid credential: it is larger than 1048576 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			began := time.Now()
			c, err := script(tt.script).run(t.Context(), Terminal{})
			if tt.err != "" {
				if e := api.AsError(err); e == nil || e.Message != tt.err || e.Code != api.ExitExecPlugin {
					t.Fatalf("error %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil || c.Token != tt.token {
				t.Fatalf("%+v, %v", c, err)
			}
			if took := time.Since(began); took > 25*time.Second {
				t.Fatalf("it waited for the helper: %v", took)
			}
		})
	}
}

// On a terminal the plugin reads what the user types, writes to it, and takes longer than a plugin without one may.
func TestPluginAsksOnTheTerminal(t *testing.T) {
	in, typed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if _, err := typed.WriteString("123456\n"); err != nil {
		t.Fatal(err)
	}
	typed.Close()
	p := script(`case $KUBERNETES_EXEC_INFO in *'"interactive":true'*) ;; *) exit 9;; esac
		echo "one-time password:" >&2; read code; sleep 0.3; echo '` + strings.ReplaceAll(answered("X"), "X", `'$code'`) + `'`)
	p.timeout = time.Millisecond
	var said bytes.Buffer
	c, err := p.run(t.Context(), Terminal{Stdin: in, Stderr: &said})
	if err != nil || c.Token != "123456" || said.String() != "one-time password:\n" {
		t.Fatalf("%+v, %v, said %q", c, err, &said)
	}
}

func TestPluginHonoursInteractiveMode(t *testing.T) {
	marker := filepath.Join(t.TempDir(), "ran")
	p := script("touch " + marker)
	p.config.InteractiveMode = clientcmdapi.AlwaysExecInteractiveMode
	_, err := p.run(t.Context(), Terminal{})
	if err == nil || err.Error() != "the credential plugin /bin/sh needs a terminal, and standard input is not one" {
		t.Fatal(err)
	}
	if _, err := os.Stat(marker); err == nil {
		t.Fatal("it ran without a terminal")
	}
	p = script(`case $KUBERNETES_EXEC_INFO in *'"interactive":false'*) cat; echo '` + answered("x") + `';; esac`)
	p.config.InteractiveMode = clientcmdapi.NeverExecInteractiveMode
	in, typed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer typed.Close() // stays open: cat would wait for it
	if c, err := p.run(t.Context(), Terminal{Stdin: in}); err != nil || c.Token != "x" {
		t.Fatalf("%+v, %v", c, err)
	}
}

// Without a terminal a plugin that hangs is killed with everything it started.
func TestPluginThatHangsIsKilled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	p := script(`sleep 1000 & echo $! > ` + file + `; wait`)
	var text []byte
	for p.timeout = 300 * time.Millisecond; len(text) == 0; p.timeout *= 2 { // until the shell is fast enough to start it
		_, err := p.run(t.Context(), Terminal{})
		want := fmt.Sprintf("the credential plugin /bin/sh did not answer within %v and was killed", p.timeout)
		if err == nil || err.Error() != want {
			t.Fatal(err)
		}
		if text, err = os.ReadFile(file); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the plugin's child is dead", func() bool { return !alive(pid) })
}

// alive is false for a zombie, too: nobody may be there to reap it.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || !strings.Contains(string(stat), ") Z ")
}

func TestPluginEndsWithCtrlC(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	started := filepath.Join(t.TempDir(), "started")
	ended := make(chan error, 1)
	go func() {
		_, err := script("touch "+started+"; exec sleep 1000").run(ctx, Terminal{Stderr: &bytes.Buffer{}})
		ended <- err
	}()
	testenv.Eventually(t, 10*time.Second, func() error { _, err := os.Stat(started); return err })
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestMissingPluginIsNamed(t *testing.T) {
	p := script("")
	p.config.Command, p.config.InstallHint = "/no/such/plugin", "get it from the shop"
	_, err := p.run(t.Context(), Terminal{})
	if e := api.AsError(err); e == nil || e.Message != "the credential plugin /no/such/plugin is not installed" || e.Hint != "get it from the shop" {
		t.Fatalf("%v", err)
	}
}

func TestDecodeCredentialRejectsInvalidAnswers(t *testing.T) {
	for _, tt := range []struct{ name, out, err string }{
		{"JSON", answered("t"), ""},
		{"YAML", "kind: ExecCredential\napiVersion: " + credentialV1 + "\nstatus: {token: t, expirationTimestamp: 2030-01-02T03:04:05Z}", ""},
		{"another version", strings.Replace(answered("t"), "/v1", "/v1beta1", 1), "the kubeconfig wants apiVersion client.authentication.k8s.io/v1, and it is client.authentication.k8s.io/v1beta1"},
		{"another kind", `{"kind":"Pod","apiVersion":"v1"}`, "it is not an ExecCredential"},
		{"no status", `{"kind":"ExecCredential","apiVersion":"` + credentialV1 + `"}`, "it has no status"},
		{"nothing in it", `{"kind":"ExecCredential","apiVersion":"` + credentialV1 + `","status":{}}`, "it has neither a token nor a certificate"},
		{"a key alone", `{"kind":"ExecCredential","apiVersion":"` + credentialV1 + `","status":{"clientKeyData":"k"}}`, "it needs both a certificate and a key"},
		{"a bad certificate", `{"kind":"ExecCredential","apiVersion":"` + credentialV1 + `","status":{"clientKeyData":"k","clientCertificateData":"c"}}`, "its certificate and key do not match"},
		{"a header of its own", answered("t\r\nX-Remote-User: admin"), "its token has characters that are invalid in an HTTP header"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := decodeCredential([]byte(tt.out), credentialV1)
			if tt.err == "" && (err != nil || c.Token != "t") || tt.err != "" && (err == nil || err.Error() != tt.err) {
				t.Fatalf("%+v, %v; want %q", c, err, tt.err)
			}
		})
	}
}

func FuzzDecodeCredential(f *testing.F) {
	f.Add([]byte(answered("t")))
	f.Add([]byte("kind: ExecCredential\napiVersion: " + credentialV1 + "\nstatus: {token: t, expirationTimestamp: 2030-01-02T03:04:05Z}"))
	f.Add([]byte(`{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1beta1","spec":{"interactive":true},"status":{"clientCertificateData":"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----","clientKeyData":"k"}}`))
	f.Add([]byte(`{"kind":"ExecCredential","apiVersion":"` + credentialV1 + `","status":{"token":"t","expirationTimestamp":"x"}}`))
	f.Add([]byte("&a [*a,*a]"))
	f.Fuzz(func(t *testing.T, out []byte) {
		c, err := decodeCredential(out, credentialV1)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\x1b\r\n") || len(err.Error()) > 4096 {
				t.Fatalf("%q", err)
			}
			return
		}
		if c.Token == "" && c.Certificate == "" || strings.ContainsAny(c.Token, "\r\n\x00") {
			t.Fatalf("accepted %q", out)
		}
	})
}
