package client

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

func TestPathNamesProxyWithoutItsPassword(t *testing.T) {
	for _, tt := range []struct{ name, server, proxy, address, shown string }{
		{"directly", "https://10.0.0.1:6443", "", "10.0.0.1:6443", ""},
		{"default port", "https://api.example", "", "api.example:443", ""},
		{"IPv6", "https://[fd00::1]:6443", "", "[fd00::1]:6443", ""},
		{"proxy", "https://10.0.0.1:6443", "http://dev:s3cret@proxy.example:3128", "proxy.example:3128", "http://dev:xxxxx@proxy.example:3128"},
		{"SOCKS", "https://10.0.0.1:6443", "socks5://proxy.example", "proxy.example:1080", "socks5://proxy.example"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := clusterAt(t, &clientcmdapi.Cluster{Server: tt.server, ProxyURL: tt.proxy}, &clientcmdapi.AuthInfo{Token: "t"}, Options{})
			if got, err := c.Path(); err != nil || got != (Path{Address: tt.address, Proxy: tt.shown}) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func TestSkewComparesClocks(t *testing.T) {
	for _, want := range []time.Duration{0, time.Hour, -48 * time.Hour} {
		server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Date", time.Now().Add(want).UTC().Format(http.TimeFormat))
		}))
		defer server.Close()
		c := clusterAt(t, serverOf(server), &clientcmdapi.AuthInfo{Token: "t"}, Options{})
		got, err := c.Skew(t.Context())
		if err != nil || (got-want).Abs() > time.Minute { // a busy machine
			t.Errorf("Skew = %v, %v, want %v", got, err, want)
		}
	}
}

func TestSkewFailsWithoutDate(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header()["Date"] = nil }))
	defer server.Close()
	c := clusterAt(t, serverOf(server), &clientcmdapi.AuthInfo{Token: "t"}, Options{})
	if skew, err := c.Skew(t.Context()); err == nil || !strings.Contains(err.Error(), "no date") {
		t.Errorf("Skew = %v, %v", skew, err)
	}
}

func TestCredentialsAreDescribedWithoutTheirContent(t *testing.T) {
	at := time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC)
	server := &clientcmdapi.Cluster{Server: "https://10.0.0.1:6443"}
	for _, tt := range []struct {
		name string
		user clientcmdapi.AuthInfo
		want Credentials
	}{
		{"none", clientcmdapi.AuthInfo{}, Credentials{Kind: "no credentials"}},
		{"token", clientcmdapi.AuthInfo{Token: "opaque"}, Credentials{Kind: "the token of the kubeconfig"}},
		{"JWT", clientcmdapi.AuthInfo{Token: "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, at.Unix())) + ".sig"}, Credentials{Kind: "the token of the kubeconfig", Expires: at}},
		{"plugin", clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{Command: "/bin/login", APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: "Always"}},
			Credentials{Kind: "the credential of the plugin /bin/login", Renewed: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := clusterAt(t, server, &tt.user, Options{})
			got := c.Credentials()
			if got.Kind != tt.want.Kind || !got.Expires.Equal(tt.want.Expires) || got.Renewed != tt.want.Renewed {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
			if c.NeedsTerminal() != (tt.name == "plugin") {
				t.Errorf("NeedsTerminal = %v", c.NeedsTerminal())
			}
		})
	}
}
