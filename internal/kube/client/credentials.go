package client

import (
	"crypto/tls"
	"crypto/x509"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Credentials describes the credentials of the user, without their content.
type Credentials struct {
	Kind    string    // "the token", "the client certificate", "the credential plugin /usr/bin/aws"
	Expires time.Time // zero: never, or unknown
	Renewed bool      // a plugin or a file renews them
}

// Credentials returns those that requests use now. It runs no plugin.
func (c *Cluster) Credentials() Credentials {
	config := c.credentials()
	out := Credentials{Kind: "no credentials"}
	switch {
	case c.login != nil:
		out.Kind, out.Renewed = "the credential of the plugin "+c.login.plugin.config.Command, true
	case config.BearerTokenFile != "":
		out.Kind, out.Renewed = "the token of "+config.BearerTokenFile, true
	case config.BearerToken != "":
		out.Kind = "the token of the kubeconfig"
	case len(config.CertData) > 0:
		out.Kind = "the client certificate of the kubeconfig"
	case config.Username != "":
		out.Kind = "user name and password of the kubeconfig"
	}
	if at, ok := tokenExpiry(tokenOf(config)); ok {
		out.Expires = at
	} else if leaf := certificateOf(config.CertData, config.KeyData); leaf != nil {
		out.Expires = leaf.NotAfter
	}
	if c.login != nil {
		c.login.mu.Lock()
		defer c.login.mu.Unlock()
		if last := c.login.current; last != nil && !last.Expires.IsZero() {
			out.Expires = last.Expires
		}
	}
	return out
}

// NeedsTerminal reports whether the user's credential plugin runs on a terminal only.
func (c *Cluster) NeedsTerminal() bool {
	return c.login != nil && c.login.plugin.config.InteractiveMode == clientcmdapi.AlwaysExecInteractiveMode
}

// certificateOf returns the client certificate, or nil if there is none that can be used.
func certificateOf(cert, key []byte) *x509.Certificate {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil
	}
	return pair.Leaf
}
