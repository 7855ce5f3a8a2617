package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
)

// The client-side limit of requests. A connect makes about twenty at once; client-go's default of 5 a second
// would make it wait.
const (
	requestsPerSecond = 50
	requestBurst      = 100
)

// Options are what Load cannot read from a kubeconfig. The zero value is usable.
type Options struct {
	UserAgent string       // "kubevpn/1.2.3"; empty: "kubevpn"
	Logger    *slog.Logger // nil: nothing is logged
	// Protocol forces PortForward to one protocol, for tests and for networks that break the other in a way
	// that cannot be recognised.
	Protocol Protocol
}

// Cluster is one Kubernetes cluster under one user's credentials. It is safe for concurrent use.
type Cluster struct {
	options Options
	log     *slog.Logger
	config  *rest.Config
	kube    *kubernetes.Clientset
	dial    *dialer
	upgrade *upgrader
	worked  atomic.Int32  // the protocol of the latest port-forward
	silence time.Duration // unproven; tests have less patience

	id      string
	name    string
	context string
	server  *url.URL
	exec    []string // the credential plugin's command as the user wrote it
}

// Load makes a Cluster from a kubeconfig with one context, as Prepare writes it. It opens no connection and
// runs no plugin. The environment's proxy variables are not looked at: Prepare has put what they say into
// the kubeconfig. Errors are *api.Error.
func Load(kubeconfig []byte, o Options) (*Cluster, error) {
	raw, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "reading the kubeconfig: %w", err)
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*raw, raw.CurrentContext, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig cannot be used: %w", err)
	}
	if o.UserAgent == "" {
		o.UserAgent = "kubevpn"
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if config.Proxy == nil {
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	}
	d := newDialer()
	config.UserAgent, config.QPS, config.Burst = o.UserAgent, requestsPerSecond, requestBurst
	config.Dial = d.DialContext
	config.ContentConfig = rest.ContentConfig{
		ContentType:        runtime.ContentTypeProtobuf,
		AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig cannot be used: %w", err)
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, api.Errorf(api.ExitKubeconfig, "the kubeconfig's server %q is not a URL: %w", config.Host, err)
	}
	c := &Cluster{
		silence: unproven,
		options: o, log: o.Logger, config: config, kube: kube, dial: d,
		upgrade: &upgrader{config: config, dial: d},
		context: raw.CurrentContext, server: server,
	}
	c.id = clusterID(server, config.CAData)
	c.describe(raw)
	return c, nil
}

func (c *Cluster) describe(raw *clientcmdapi.Config) {
	kctx := raw.Contexts[raw.CurrentContext]
	if kctx == nil {
		return
	}
	c.name = kctx.Cluster
	if user := raw.AuthInfos[kctx.AuthInfo]; user != nil && user.Exec != nil {
		c.exec = unwrapExec(user.Exec)
	}
}

// clusterID is the same for every kubeconfig that names the same server under the same authority.
func clusterID(server *url.URL, ca []byte) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s://%s%s\n", server.Scheme, server.Host, server.Path)
	h.Write(ca)
	return hex.EncodeToString(h.Sum(nil))[:12]
}

// Kube returns the client for the cluster's API. Core types travel as protobuf.
func (c *Cluster) Kube() kubernetes.Interface { return c.kube }

// Server is the API server's URL.
func (c *Cluster) Server() string { return c.server.String() }

// ID is 12 hex digits that identify the cluster: the same for the same server URL and authority.
func (c *Cluster) ID() string { return c.id }

// Name is what the kubeconfig calls the cluster.
func (c *Cluster) Name() string { return c.name }

// Context is the kubeconfig's context.
func (c *Cluster) Context() string { return c.context }

// Resolve looks up every address of the API server, or of the proxy before it, so that Addresses is complete
// before anything is routed.
func (c *Cluster) Resolve(ctx context.Context) error {
	host, err := firstHop(c.server, c.config.Proxy)
	if err != nil {
		return err
	}
	return c.dial.resolve(ctx, host)
}

// Addresses returns, sorted, every address that this cluster's connections went to or may go to: the API
// server's, or its proxy's. They must never be routed into the tunnel.
func (c *Cluster) Addresses() []netip.Addr { return c.dial.addresses() }
