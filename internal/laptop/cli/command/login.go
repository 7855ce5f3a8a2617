package command

import (
	"cmp"
	"context"
	"sync"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
)

// Login is Load for a command that changes the cluster or connects to it. It runs the credential plugin of the
// kubeconfig on this terminal, and checks that the API server answers before kubevpn asks for a password.
func (k *ClusterFlags) Login(ctx context.Context, on func(api.Event)) (Selection, error) {
	return k.loginBeside(ctx, on, func(context.Context, Selection) {})
}

// loginBeside is Login. It calls beside during the check, so that beside adds no round trip.
func (k *ClusterFlags) loginBeside(ctx context.Context, on func(api.Event),
	beside func(context.Context, Selection)) (Selection, error) {
	if k.reached != nil { // for a list to pick from
		beside(ctx, *k.reached)
		return *k.reached, nil
	}
	timeout, err := k.Timeout()
	if err != nil {
		return Selection{}, err
	}
	s, err := k.Load()
	if err != nil {
		return s, err
	}
	hosts, err := s.OpenJump(ctx, k.f.LoginTerminal())
	if err != nil {
		return s, err
	}
	if hosts != "" {
		on(api.Event{Step: "Connecting to the jump host", Detail: hosts, Done: true})
	}
	if s.Credential, err = s.Login(ctx, k.f.LoginTerminal()); err != nil {
		return s, err
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
	s.opened = opened
	wg.Go(func() { beside(ctx, s) })
	if err := s.Reach(reaching, cmp.Or(s.Config.ManagerNamespace, "kubevpn"), s.Prepared.Namespace); err != nil {
		return s, err
	}
	wg.Wait()
	on(api.Event{Step: step, Detail: s.Server(), Done: true})
	k.reached = &s
	return s, nil
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

// LoginWithDefaults is Login. The settings have the client defaults of the cluster. It warns about defaults that it
// cannot use. While it waits for the API server, it calls prepare, unless that is nil, with the settings before the
// defaults.
func (k *ClusterFlags) LoginWithDefaults(ctx context.Context, on func(api.Event),
	prepare func(context.Context, Selection)) (Selection, error) {
	var defaults install.Defaults
	var failed error
	s, err := k.loginBeside(ctx, on, func(ctx context.Context, s Selection) {
		if prepare != nil {
			prepare(ctx, s)
		}
		select {
		case <-s.opened:
			defaults, failed = install.ReadDefaults(ctx, s.Cluster, s.Config.ManagerNamespace, s.Prepared.Namespace)
		case <-ctx.Done():
		}
	})
	if err != nil {
		return s, err
	}
	if failed != nil {
		on(api.Event{Warning: "continuing without the client defaults of the cluster: " + s.Explain(failed).Message})
	}
	for _, warning := range s.Config.ApplyDefaults(defaults.Source, defaults.Data) {
		on(api.Event{Warning: warning})
	}
	return s, nil
}
