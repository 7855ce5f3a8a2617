package client

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"

	"kubevpn/internal/api"
)

// The pause after a plugin failed without a terminal, doubling. A machine that wakes up has its network some seconds
// later; some plugins open a browser window at each run.
const (
	minLoginPause = 5 * time.Second
	maxLoginPause = time.Minute
)

// login holds the credential of a user whose kubeconfig has a credential plugin. If it has expired, or the API server
// rejects it, the next request runs the plugin again, without a terminal. A nil *login stands for a user with other
// credentials. It is safe for concurrent use.
type login struct {
	plugin *plugin
	hint   string                          // how to log in again
	conns  *connrotation.ConnectionTracker // authenticated by a client certificate
	state  loginState

	mu      sync.Mutex // held while get runs the plugin, once for all requests that wait
	current *api.Credential
	cert    *tls.Certificate // of current; nil: it has only a token
	refused bool             // the API server does not accept current
}

// loginState tells whether the user must log in. It has a mutex of its own, so that LoginRequired does not wait for the
// plugin. It is safe for concurrent use.
type loginState struct {
	mu       sync.Mutex
	required *api.Error // nil: no need
	failedAt time.Time  // when required was set
	pause    time.Duration
}

// set records why the user must log in, or nil. Each failure in a row doubles the pause.
func (s *loginState) set(required *api.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.required, s.failedAt = required, time.Now()
	s.pause = min(max(2*s.pause, minLoginPause), maxLoginPause)
	if required == nil {
		s.pause = 0
	}
}

// get returns why the user must log in, or nil, and whether the pause after the last failure has not ended.
func (s *loginState) get() (required *api.Error, pausing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.required, time.Since(s.failedAt) < s.pause
}

func newLogin(config *rest.Config, contextName string) (*login, error) {
	p, err := newPlugin(config)
	if p == nil || err != nil {
		return nil, err
	}
	hint := fmt.Sprintf("Log in again with `kubevpn connect --context %s` in a terminal; open connections go on.",
		api.ShellQuote(contextName))
	return &login{plugin: p, hint: hint, conns: connrotation.NewConnectionTracker()}, nil
}

// loginError is a plugin's failure that net/http wraps. It hides the *api.Error from errors.As, so that Explain drops
// the text that net/http adds.
type loginError struct{ why *api.Error }

func (e *loginError) Error() string { return e.why.Error() }

// set replaces the credential.
func (l *login) set(c *api.Credential) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.replace(c)
}

// replace replaces the credential. The caller holds mu.
func (l *login) replace(c *api.Credential) error {
	cert, err := checkCredential(c)
	if err != nil {
		return fmt.Errorf("the credential cannot be used: %w", err)
	}
	rotated := l.cert != nil && (l.current == nil || l.current.Certificate != c.Certificate)
	l.current, l.cert, l.refused = c, cert, false
	l.state.set(nil)
	if rotated {
		l.conns.CloseAll() // the API server authenticates a connection only once
	}
	return nil
}

// get returns the credential. It runs the plugin if there is none that is valid. Errors are *loginError.
func (l *login) get() (*api.Credential, *tls.Certificate, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.current; c != nil && !l.refused && (c.Expires.IsZero() || time.Now().Before(c.Expires)) {
		return c, l.cert, nil
	}
	if why, pausing := l.state.get(); why != nil && pausing {
		return nil, nil, &loginError{why}
	}
	c, err := l.plugin.run(context.Background(), Terminal{}) // the plugin's timeout limits it
	if err == nil {
		err = l.replace(c)
	}
	if err != nil {
		e := api.Errorf(api.ExitExecPlugin, "login required: %w", err).WithHint("%s", l.hint)
		l.state.set(e)
		return nil, nil, &loginError{e}
	}
	return l.current, l.cert, nil
}

// refuse makes the next request run the plugin, unless another credential has replaced c.
func (l *login) refuse(c *api.Credential) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current == c {
		l.refused = true
	}
}

// transportConfig returns the transport's configuration with the login's credential.
func (l *login) transportConfig(config *rest.Config) (*transport.Config, error) {
	t, err := config.TransportConfig()
	if l == nil || err != nil {
		return t, err
	}
	t.TLS.GetCertHolder = &transport.GetCertHolder{GetCert: func() (*tls.Certificate, error) {
		_, cert, err := l.get()
		return cert, err
	}}
	t.DialHolder = &transport.DialHolder{Dial: connrotation.NewDialerWithTracker(t.DialHolder.Dial,
		l.conns).DialContext}
	return t, nil
}

// withCertificate returns a copy of the configuration with the credential's client certificate, for libraries that
// build their own transport. The configuration's wrapper adds the token.
func (l *login) withCertificate(config *rest.Config) (*rest.Config, error) {
	config = rest.CopyConfig(config)
	if l == nil {
		return config, nil
	}
	c, _, err := l.get()
	if err != nil {
		return nil, err
	}
	config.CertData, config.KeyData = []byte(c.Certificate), []byte(c.Key)
	return config, nil
}

// wrap adds the token to requests.
func (l *login) wrap(rt http.RoundTripper) http.RoundTripper { return &authenticated{l, rt} }

type authenticated struct {
	login *login
	base  http.RoundTripper
}

// WrappedRoundTripper lets client-go find the transport below.
func (a *authenticated) WrappedRoundTripper() http.RoundTripper { return a.base }

func (a *authenticated) RoundTrip(req *http.Request) (*http.Response, error) {
	c, _, err := a.login.get()
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	if c.Token != "" {
		req = req.Clone(req.Context())
		req.Header.Set("Authorization", "Bearer "+c.Token)
	}
	resp, err := a.base.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusUnauthorized {
		a.login.refuse(c)
	}
	return resp, err
}

// Login runs the user's credential plugin on a terminal, and uses its credential from then on. It returns nil if the
// kubeconfig has no plugin. Errors are *api.Error, or ctx's.
func (c *Cluster) Login(ctx context.Context, t Terminal) (*api.Credential, error) {
	if c.login == nil {
		return nil, nil
	}
	credential, err := c.login.plugin.run(ctx, t)
	if err != nil {
		return nil, err
	}
	return credential, c.SetCredential(credential)
}

// SetCredential replaces the credential of a user whose kubeconfig has a credential plugin. For others, and for nil, it
// does nothing.
func (c *Cluster) SetCredential(credential *api.Credential) error {
	if c.login == nil || credential == nil {
		return nil
	}
	return c.login.set(credential)
}

// credentials returns the configuration with the latest credential of the user's plugin.
func (c *Cluster) credentials() *rest.Config {
	if c.login == nil {
		return c.config
	}
	config := rest.CopyConfig(c.config)
	c.login.mu.Lock()
	defer c.login.mu.Unlock()
	if last := c.login.current; last != nil {
		config.BearerToken, config.CertData, config.KeyData = last.Token, []byte(last.Certificate), []byte(last.Key)
	}
	return config
}

// LoginRequired returns why only the user can renew the expired credentials, or nil. It does not block.
func (c *Cluster) LoginRequired() *api.Error {
	if c.login == nil {
		return nil
	}
	required, _ := c.login.state.get()
	return required
}
