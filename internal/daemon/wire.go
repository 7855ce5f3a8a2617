package daemon

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/clone"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/intercept"
	"kubevpn/internal/session"
	"kubevpn/internal/version"
)

// This is the one place where the daemon meets internal/session and internal/intercept.

// NewSession makes a Connection of internal/session.
func NewSession(c ConnectionConfig) (Connection, error) { return newSession(c, nil) }

// newSession makes one whose device is where dial connects from; nil: on this machine.
func newSession(c ConnectionConfig, dial func(ctx context.Context, network, address string) (net.Conn, error)) (Connection, error) {
	s, err := session.New(session.Config{
		Request: c.Request, Network: c.Network, Dial: dial, ClientID: c.ClientID, Progress: c.Progress, Logger: c.Logger,
	})
	if err != nil {
		return nil, err // a bare return of (s, err) would be a typed nil in the interface
	}
	return s, nil
}

// NewInterceptor makes intercepts of internal/intercept, on connections of NewSession.
func NewInterceptor() Interceptor { return interceptor{} }

type interceptor struct{}

// Resolve asks the cluster only where it has to: for kinds that are not Kubernetes' own.
func (interceptor) Resolve(ctx context.Context, account api.ConnectRequest, workload string) (string, error) {
	kind, name, _ := strings.Cut(workload, "/")
	if known := builtinKind(kind); known != "" {
		return known + "/" + name, nil
	}
	c, err := clusterOf(account, nil)
	if err != nil {
		return "", err
	}
	w, err := c.Workload(ctx, account.Namespace, workload)
	if err != nil {
		return "", err
	}
	return w.String(), nil
}

func (interceptor) Intercept(c InterceptConfig) (Intercept, error) {
	s, ok := c.Connection.(intercept.Session)
	if !ok {
		return nil, fmt.Errorf("nothing can be intercepted by way of a %T", c.Connection)
	}
	own, err := clusterOf(c.Account, c.Logger)
	if err != nil {
		return nil, err
	}
	cfg := intercept.Config{
		Cluster: own, Session: s, Namespace: c.Account.Namespace, Workload: c.Workload, Spec: c.Spec, Image: agentImage(c.Account),
		Owner: c.Owner.Name, Key: c.Owner.Key, Dial: c.Dial, Progress: c.Progress, Logger: c.Logger,
	}
	if c.Spec.Clone != nil {
		return newCloned(own, cfg)
	}
	i, err := intercept.New(cfg)
	if err != nil {
		return nil, err
	}
	return i, nil
}

func newCloned(own *cluster.Cluster, cfg intercept.Config) (Intercept, error) {
	key, err := x509.MarshalPKIXPublicKey(&cfg.Key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("hashing the owner's key: %w", err)
	}
	c := &cloned{begun: make(chan struct{})}
	spec := *cfg.Spec.Clone
	if strings.HasPrefix(cfg.Workload, "cronjob/") {
		if m := cfg.Spec.Match; len(m.Headers) > 0 || m.Path != "" || len(m.Methods) > 0 {
			return nil, api.Errorf(api.ExitUsage, "no requests are for %s, which could match: its pods come by the clock, and end", cfg.Workload).
				WithHint("leave --headers, --path and --method out")
		}
		spec.NoTraffic = true
	}
	if !spec.NoTraffic {
		cfg.Clone = true
		if c.intercept, err = intercept.New(cfg); err != nil {
			return nil, err
		}
	}
	image := cfg.Session.Image
	if cfg.Image != "" {
		image = func(context.Context) (string, error) { return cfg.Image, nil }
	}
	c.clone = clone.New(clone.Config{
		Cluster: own, Namespace: cfg.Namespace, Workload: cfg.Workload, Spec: spec, Image: image,
		Owner: cfg.Owner, Key: api.KeyHash(key), OnPods: c.onPods, Progress: cfg.Progress, Logger: cfg.Logger,
	})
	return c, nil
}

// clusterOf is the cluster under the account, which may be another than that of the connection.
func clusterOf(account api.ConnectRequest, logger *slog.Logger) (*cluster.Cluster, error) {
	return cluster.Load(account.Kubeconfig, cluster.Options{UserAgent: "kubevpn/" + version.String(), Logger: logger})
}

// agentImage is the image that was asked for, or "", which is the traffic manager's: the nodes can pull that.
func agentImage(account api.ConnectRequest) string {
	if account.Image == config.Default().Image {
		return ""
	}
	return account.Image
}
