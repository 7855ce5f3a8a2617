//go:build e2e && linux

package e2e

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// The user of the proxies, and their passwords. tinyproxy's has no characters that URLs escape.
const proxyUser, httpPassword, socksPassword = "dev", "w0rd_of-the.proxy", "p@ss+w0rd"

// proxiesSuite reaches the API server only through proxies with authentication: tinyproxy and microsocks.
func proxiesSuite(t *testing.T, w *world) {
	testenv.NeedPrograms(t, "tinyproxy", "microsocks")
	w = w.by("")
	router := w.Config().Families()[0].Router
	dir := t.TempDir()
	l := w.newUser(t, lab.Admin)
	config := filepath.Join(dir, "tinyproxy.conf")
	httpProxy, socksProxy := netip.AddrPortFrom(router, 3128), netip.AddrPortFrom(router, 1080)
	err := os.WriteFile(config, fmt.Appendf(nil, "Listen %s\nPort %d\nBasicAuth %s %s\nConnectPort %d\nTimeout 600\n",
		httpProxy.Addr(), httpProxy.Port(), proxyUser, httpPassword, lab.APIPort), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	w.startBeside(t, "router", httpProxy.String(), "tinyproxy", "-d", "-c", config)
	w.startBeside(t, "router", socksProxy.String(), "microsocks", "-i", router.String(), "-p", fmt.Sprint(socksProxy.Port()),
		"-u", proxyUser, "-P", socksPassword)
	w.blockAPI(t)
	before := l.snapshot(t)

	for _, p := range []proxy{
		{"http", httpProxy.String(), httpPassword, "answers (Unauthorized|Proxy Authentication Required)"},
		{"socks5", socksProxy.String(), socksPassword, "authentication failed"},
	} {
		kubeconfig := l.variant(t, func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) { c.ProxyURL = p.url(p.password) })
		// First the kubeconfig: the environment must reach a daemon that runs.
		t.Run(p.scheme+"_in_the_kubeconfig", func(t *testing.T) {
			p.connects(t, l, api.TransportAPIProxy, "env", "KUBECONFIG="+kubeconfig, l.program)
			l.sameAs(t, before)
		})
		t.Run(p.scheme+"_in_the_environment", func(t *testing.T) {
			p.connects(t, l, api.TransportPortForward, "env", "HTTPS_PROXY="+p.url(p.password), l.program)
			l.sameAs(t, before)
		})
		t.Run(p.scheme+"_exec", func(t *testing.T) {
			r := l.run(t, "env", "HTTPS_PROXY="+p.url(p.password), l.program, "env", "deployment/web")
			if r.code != 0 || !strings.Contains(r.stderr, noCat) {
				t.Error(r)
			}
		})
		t.Run(p.scheme+"_doctor", func(t *testing.T) {
			f := l.diagnose(t, "env", "HTTPS_PROXY="+p.url(p.password), l.program, "doctor", "-o", "json")
			if seen := f["address"].Seen; !strings.Contains(seen, "by the proxy "+p.scheme+"://dev:xxxxx@"+p.address) {
				t.Errorf("the way to the API server: %q", seen)
			}
			only(t, f)
		})
		t.Run(p.scheme+"_wrong_password", func(t *testing.T) {
			r := l.run(t, "env", "HTTPS_PROXY="+p.url("s3cret"), l.program, "connect")
			failure{code: api.ExitUnreachable, message: p.message, hint: "proxy"}.check(t, r)
			if strings.Contains(r.stderr, "s3cret") {
				t.Errorf("the password is shown: %v", r)
			}
		})
	}
}

// proxy is a proxy to the API server.
type proxy struct {
	scheme, address, password string
	message                   string // a regular expression for the error after a wrong password
}

func (p proxy) url(password string) string {
	return (&url.URL{Scheme: p.scheme, Host: p.address, User: url.UserPassword(proxyUser, password)}).String()
}

// connects checks that the command connects by the transport, and that nothing shows the password.
func (p proxy) connects(t *testing.T, l *laptop, transport string, command ...string) {
	t.Helper()
	r := l.run(t, append(command, "connect", "-v=8", "--transport", transport)...)
	if r.code != 0 {
		t.Fatal(r)
	}
	if c := l.connection(t); !strings.HasPrefix(c.Transport, transport) || c.Error != nil {
		t.Errorf("%q: %v", c.Transport, c.Error)
	}
	if _, err := l.get(t, "http://web.default/"); err != nil {
		t.Error(err)
	}
	log, err := os.ReadFile(filepath.Join(l.home, "state/kubevpn/daemon.log"))
	if err != nil {
		t.Fatal(err)
	}
	said := r.stdout + r.stderr + l.must(t, "kubevpn", "status", "-o", "json") + l.must(t, "kubevpn", "status", "-o", "wide") + string(log)
	basic := base64.StdEncoding.EncodeToString([]byte(proxyUser + ":" + p.password))
	for _, secret := range []string{p.password, url.QueryEscape(p.password), url.UserPassword("", p.password).String(), basic} {
		if at := strings.Index(said, secret); at >= 0 {
			t.Errorf("the password is shown: %s", said[max(0, at-200):at])
		}
	}
	l.must(t, "kubevpn", "disconnect", "--all")
}
