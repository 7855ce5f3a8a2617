package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

// The client-side limit of requests. A connect makes about twenty at once, too many for client-go's default of 5 per
// second.
const (
	requestsPerSecond = 50
	requestBurst      = 100
)

// Options configures Load. The zero value is usable.
type Options struct {
	Logger *slog.Logger // nil: nothing is logged
	// Credential is the answer of the user's credential plugin in another process. Nil: the plugin runs when needed.
	Credential *api.Credential
	// LoginOf is a Cluster of the same user with which this one shares its credential. Nil: it has its own.
	LoginOf *Cluster
}

// Cluster is one Kubernetes cluster under one user's credentials. It is safe for concurrent use.
type Cluster struct {
	config  *rest.Config
	kube    *kubernetes.Clientset
	dynamic dynamic.Interface
	login   *login // nil: the kubeconfig has no credential plugin
	dial    *dialer
	conns   *apiConns // of Kube's requests
	log     *slog.Logger

	ids         IDs
	account     string // hash: see accountOf
	name        string
	contextName string
	server      *url.URL
}

// Load returns a Cluster for a kubeconfig with one context, which Prepare has written. It opens no connection and runs
// no plugin. It ignores the proxy variables of the environment, because Prepare has written the proxy into the
// kubeconfig. Errors are *api.Error.
func Load(kubeconfig []byte, o Options) (*Cluster, error) {
	raw, config, err := parse(kubeconfig)
	if err != nil {
		return nil, err
	}
	return load(raw, config, o)
}

// Load is the function Load in the process that prepared the kubeconfig, which need not parse it again.
func (p Prepared) Load(o Options) (*Cluster, error) {
	if p.config == nil {
		return Load(p.Kubeconfig, o)
	}
	raw := p.config.DeepCopy() // the login changes it
	config, err := restConfig(raw)
	if err != nil {
		return nil, err
	}
	return load(raw, config, o)
}

func load(raw *clientcmdapi.Config, config *rest.Config, o Options) (_ *Cluster, err error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if config.Proxy == nil {
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	}
	d := newDialer()
	if d.jump, err = jumpOf(raw); err != nil {
		return nil, err
	}
	config.UserAgent, config.QPS, config.Burst = "kubevpn/"+version.String(), requestsPerSecond, requestBurst
	conns := &apiConns{dialer: d}
	config.Dial = conns.DialContext
	config.ContentConfig = rest.ContentConfig{
		ContentType:        runtime.ContentTypeProtobuf,
		AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
	}
	l, err := loginFor(config, raw, o)
	if err != nil {
		return nil, err
	}
	kube, err := clientFor(config, l)
	if err != nil {
		return nil, unusable(err)
	}
	server, err := serverURL(config)
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		config: config, kube: kube, login: l, dial: d, conns: conns, log: o.Logger,
		contextName: raw.CurrentContext, server: server,
	}
	c.ids = idsOf(server, raw, config)
	if c.account, err = accountOf(raw); err != nil {
		return nil, unusable(err)
	}
	if kctx := raw.Contexts[raw.CurrentContext]; kctx != nil {
		c.name = kctx.Cluster
	}
	config = rest.CopyConfig(config)
	config.RateLimiter, config.WarningHandler = kube.CoreV1().RESTClient().GetRateLimiter(), rest.NoWarnings{}
	if c.dynamic, err = dynamic.NewForConfigAndClient(config, c.httpClient()); err != nil {
		return nil, unusable(err)
	}
	return c, nil
}

// IDs identify a cluster and a connection to it, by 12 hex digits each.
type IDs struct {
	Cluster    string // the same for the same server URL and authority
	Connection string // the same for the same cluster, user of the kubeconfig, and impersonation
}

// Identify returns the IDs of the Cluster that Load would return, without a client for it.
func Identify(kubeconfig []byte) (IDs, error) {
	raw, config, err := parse(kubeconfig)
	if err != nil {
		return IDs{}, err
	}
	server, err := serverURL(config)
	if err != nil {
		return IDs{}, err
	}
	return idsOf(server, raw, config), nil
}

// HasAccount reports whether the kubeconfig, which Prepare has written, has the server and the credentials of c.
func (c *Cluster) HasAccount(kubeconfig []byte) bool {
	raw, _, err := parse(kubeconfig)
	if err != nil {
		return false
	}
	account, err := accountOf(raw)
	return err == nil && account == c.account
}

// accountOf returns a hash of everything in a kubeconfig but the namespace of its context and what depends on the
// environment of the terminal, which the jump hosts contain too. Users with one context share a login in any
// environment: see LoginOf.
func accountOf(raw *clientcmdapi.Config) (string, error) {
	raw = raw.DeepCopy()
	for _, kctx := range raw.Contexts {
		kctx.Namespace = ""
	}
	for _, cluster := range raw.Clusters {
		delete(cluster.Extensions, jumpExtension)
	}
	for _, user := range raw.AuthInfos {
		delete(user.Extensions, environExtension)
		delete(user.Extensions, refusalExtension)
	}
	text, err := clientcmd.Write(*raw)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

// parse reads a kubeconfig with one context.
func parse(kubeconfig []byte) (*clientcmdapi.Config, *rest.Config, error) {
	raw, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig%s", kubeconfigFault(err))
	}
	config, err := restConfig(raw)
	return raw, config, err
}

// restConfig returns client-go's configuration for a kubeconfig with one context.
func restConfig(raw *clientcmdapi.Config) (*rest.Config, error) {
	config, err := clientcmd.NewNonInteractiveClientConfig(*raw, raw.CurrentContext, &clientcmd.ConfigOverrides{},
		nil).ClientConfig()
	if err != nil {
		return nil, unusable(err)
	}
	return config, nil
}

func serverURL(config *rest.Config) (*url.URL, error) {
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig's server %q is not a URL: %w", config.Host, err)
	}
	return server, nil
}

// unusable explains why client-go does not accept the kubeconfig.
func unusable(err error) *api.Error {
	text := strings.TrimPrefix(api.OneLine(redacted(err.Error())), "invalid configuration: ")
	if strings.Contains(text, "failed to find any PEM data") || strings.Contains(text, "x509: ") {
		text = "its certificate or key is not PEM: " + strings.TrimPrefix(text, "tls: ")
	}
	return api.Errorf(api.ExitKubeconfig, "the kubeconfig cannot be used: %s", text).
		WithHint("Fetch it again with the cluster's own tool. `kubectl config view --minify` prints it.")
}

// loginFor moves the credential plugin from the configuration to a login, and adds its credential to requests.
func loginFor(config *rest.Config, raw *clientcmdapi.Config, o Options) (*login, error) {
	l, err := newLogin(config, raw.CurrentContext)
	if err != nil {
		return nil, unusable(err)
	}
	if l == nil {
		return nil, nil
	}
	if _, err := extension(userOf(raw).Extensions, refusalExtension, &l.plugin.refusal); err != nil {
		return nil, err
	}
	if _, err := extension(userOf(raw).Extensions, environExtension, &l.plugin.environ); err != nil {
		return nil, err
	}
	if o.LoginOf != nil && o.LoginOf.login != nil {
		l = o.LoginOf.login
	}
	if o.Credential != nil {
		if err := l.set(o.Credential); err != nil {
			return nil, api.Errorf(api.ExitExecPlugin, "%w", err)
		}
	}
	config.Wrap(l.wrap)
	return l, nil
}

func clientFor(config *rest.Config, l *login) (*kubernetes.Clientset, error) {
	t, err := l.transportConfig(config)
	if err != nil {
		return nil, err
	}
	rt, err := transport.New(t)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfigAndClient(config, &http.Client{Transport: rt})
}

// idsOf returns the IDs for a kubeconfig with one context. They cover the name of the user, not the credentials,
// because users renew those.
func idsOf(server *url.URL, raw *clientcmdapi.Config, config *rest.Config) IDs {
	cluster := fmt.Sprintf("%s://%s%s\n%s", server.Scheme, server.Host, server.Path, config.CAData)
	ids := IDs{Cluster: shortHash(cluster)}
	user := ""
	if kctx := raw.Contexts[raw.CurrentContext]; kctx != nil {
		user = kctx.AuthInfo
	}
	as := config.Impersonate // fmt sorts its map
	ids.Connection = shortHash(fmt.Sprintf("%s\n%q %q %q %q %q", ids.Cluster, user, as.UserName, as.UID, as.Groups,
		as.Extra))
	return ids
}

// shortHash returns 12 hex digits.
func shortHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])[:12]
}

// Kube returns the client for the cluster's API. Core types travel as protobuf.
func (c *Cluster) Kube() kubernetes.Interface { return c.kube }

// Dynamic returns a client for objects of any kind. It shares the connections and the limit of requests of Kube. It
// does not print the API server's warnings: they are about users' objects, or about a sidecar, which repeats the name
// of a port on purpose.
func (c *Cluster) Dynamic() dynamic.Interface { return c.dynamic }

// httpClient returns the client of the requests of Kube.
func (c *Cluster) httpClient() *http.Client {
	return c.kube.CoreV1().RESTClient().(*rest.RESTClient).Client
}

// TransportConfig returns the TLS configuration, the proxy and the credentials of requests to the API server, for
// packages that make requests of their own. It includes what a credential plugin returns, also later.
func (c *Cluster) TransportConfig() (*transport.Config, error) {
	return c.login.transportConfig(c.config)
}

// DialContext opens a TCP connection to the API server, or to the proxy before it. Without jump hosts, Addresses
// includes the address from then on.
func (c *Cluster) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return c.dial.DialContext(ctx, network, address)
}

// Release closes idle connections to the API server, and lets the SSH connection to the jump hosts end when nothing
// uses it. Later requests open them again.
func (c *Cluster) Release() {
	utilnet.CloseIdleConnectionsFor(c.httpClient().Transport)
	if c.dial.jump != nil {
		c.dial.jump.Release()
	}
}

// Logger returns the logger of Options, or one that discards everything.
func (c *Cluster) Logger() *slog.Logger { return c.log }

// Opening returns a context for a first request, and a channel that is closed when the request has a connection to the
// API server. Later requests share it; requests that begin before then open connections of their own.
func Opening(ctx context.Context) (context.Context, <-chan struct{}) {
	opened := make(chan struct{})
	got := sync.OnceFunc(func() { close(opened) })
	trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { got() }}
	return httptrace.WithClientTrace(ctx, trace), opened
}

// Server returns the URL of the API server.
func (c *Cluster) Server() string { return c.server.String() }

// ID returns the ID of the cluster.
func (c *Cluster) ID() string { return c.ids.Cluster }

// ConnectionID returns the ID of a connection to the cluster as this user.
func (c *Cluster) ConnectionID() string { return c.ids.Connection }

// Name returns the name of the cluster in the kubeconfig.
func (c *Cluster) Name() string { return c.name }

// Context returns the name of the kubeconfig's context.
func (c *Cluster) Context() string { return c.contextName }

// Resolve looks up all addresses of the API server, of its proxy, or of the host to which ssh connects, so that
// Addresses is complete before the connection routes anything. ssh may know a host that this process cannot look up.
func (c *Cluster) Resolve(ctx context.Context) error {
	if c.dial.jump != nil {
		host, err := c.dial.jump.Peer(ctx)
		if err == nil && host != "" {
			err = c.dial.resolve(ctx, host)
		}
		if err != nil {
			c.log.Warn("the address of the jump host is unknown", "err", err)
		}
		return ctx.Err()
	}
	hop := c.server
	if via, err := c.proxy(); err != nil {
		return err
	} else if via != nil {
		hop = via
	}
	return c.dial.resolve(ctx, hop.Hostname())
}

// Addresses returns the known addresses that Resolve looks up, sorted. They must never be routed into the tunnel.
func (c *Cluster) Addresses() []netip.Addr { return c.dial.addresses() }
