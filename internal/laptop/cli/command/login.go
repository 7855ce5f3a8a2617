package command

import (
	"cmp"
	"context"
	"sync"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
)

// Login is Load for a command that changes the cluster or connects to it. It runs the credential plugin of the
// kubeconfig on this terminal, and checks that the API server answers before kubevpn asks for a password.
// managerNamespace is the namespace of the traffic manager, or "".
func (k *ClusterFlags) Login(ctx context.Context, on func(api.Event),
	managerNamespace string) (*client.Cluster, client.Prepared, error) {
	return k.loginBeside(ctx, on, managerNamespace, func(context.Context, login) {})
}

// login is what a command has when it is logged in.
type login struct {
	*client.Cluster
	client.Prepared
	opened <-chan struct{} // closed when requests have a connection to the API server, which later ones share
}

// loginBeside is Login. It calls beside during the check, so that beside adds no round trip.
func (k *ClusterFlags) loginBeside(ctx context.Context, on func(api.Event), managerNamespace string,
	beside func(context.Context, login)) (*client.Cluster, client.Prepared, error) {
	timeout, err := k.Timeout()
	if err != nil {
		return nil, client.Prepared{}, err
	}
	c, prepared, err := k.Load()
	if err != nil {
		return nil, prepared, err
	}
	hosts, err := c.OpenJump(ctx, k.f.LoginTerminal())
	if err != nil {
		return nil, prepared, err
	}
	if hosts != "" {
		on(api.Event{Step: "Connecting to the jump host", Detail: hosts, Done: true})
	}
	if prepared.Credential, err = c.Login(ctx, k.f.LoginTerminal()); err != nil {
		return nil, prepared, err
	}
	const step = "Reaching the API server"
	on(api.Event{Step: step})
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if timeout > 0 {
		bounded, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		ctx = bounded
	}
	reaching, opened := client.Opening(ctx)
	wg.Go(func() { beside(ctx, login{c, prepared, opened}) })
	if err := c.Reach(reaching, cmp.Or(managerNamespace, "kubevpn"), prepared.Namespace); err != nil {
		return nil, prepared, err
	}
	wg.Wait()
	on(api.Event{Step: step, Detail: c.Server(), Done: true})
	return c, prepared, nil
}

// Timeout returns the time limit for the first answer of the API server; 0: none.
func (k *ClusterFlags) Timeout() (time.Duration, error) {
	timeout, err := clientcmd.ParseTimeout(k.Inputs.Overrides.Timeout)
	if err != nil {
		return 0, api.Errorf(api.ExitUsage, "--request-timeout: %q is not a duration", k.Inputs.Overrides.Timeout).
			WithHint("write it like 10s or 1m; 0 sets no limit")
	}
	return timeout, nil
}

// ResolveSettings logs in and returns the settings, with the client defaults of the cluster. It warns about defaults
// that it cannot use.
func (k *ClusterFlags) ResolveSettings(ctx context.Context, on func(api.Event)) (config.Config, error) {
	cfg, _, _, err := k.resolve(ctx, on, nil)
	return cfg, err
}

// resolve is ResolveSettings. While it waits for the API server, it calls prepare, unless that is nil, with the
// settings before the defaults.
func (k *ClusterFlags) resolve(ctx context.Context, on func(api.Event),
	prepare func(context.Context, config.Config, login)) (config.Config, *client.Cluster, client.Prepared, error) {
	cfg, err := k.Settings()
	if err != nil {
		return cfg, nil, client.Prepared{}, err
	}
	var defaults install.Defaults
	var failed error
	c, prepared, err := k.loginBeside(ctx, on, cfg.ManagerNamespace,
		func(ctx context.Context, l login) {
			if prepare != nil {
				prepare(ctx, cfg, l)
			}
			select {
			case <-l.opened:
				defaults, failed = install.ReadDefaults(ctx, l.Cluster, cfg.ManagerNamespace, l.Prepared.Namespace)
			case <-ctx.Done():
			}
		})
	if err != nil {
		return cfg, nil, prepared, err
	}
	if failed != nil {
		on(api.Event{Warning: "continuing without the client defaults of the cluster: " + c.Explain(failed).Message})
	}
	for _, warning := range cfg.ApplyDefaults(defaults.Source, defaults.Data) {
		on(api.Event{Warning: warning})
	}
	return cfg, c, prepared, nil
}
