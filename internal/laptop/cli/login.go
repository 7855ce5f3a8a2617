package cli

import (
	"cmp"
	"context"
	"sync"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/term"
)

// login is load for a command that changes the cluster or connects to it. It runs the credential plugin of the
// kubeconfig on this terminal, and checks that the API server answers before kubevpn asks for a password.
// managerNamespace is the namespace of the traffic manager, or "".
func (k *kubeFlags) login(ctx context.Context, a *app, on func(api.Event),
	managerNamespace string) (*client.Cluster, client.Prepared, error) {
	return k.loginBeside(ctx, a, on, managerNamespace, func(context.Context, login) {})
}

// login is what a command has when it is logged in.
type login struct {
	*client.Cluster
	client.Prepared
	opened <-chan struct{} // closed when requests have a connection to the API server, which later ones share
}

// loginBeside is login. It calls beside during the check, so that beside adds no round trip.
func (k *kubeFlags) loginBeside(ctx context.Context, a *app, on func(api.Event), managerNamespace string,
	beside func(context.Context, login)) (*client.Cluster, client.Prepared, error) {
	timeout, err := k.timeout()
	if err != nil {
		return nil, client.Prepared{}, err
	}
	c, prepared, err := k.load(a)
	if err != nil {
		return nil, prepared, err
	}
	hosts, err := c.OpenJump(ctx, a.pluginTerminal())
	if err != nil {
		return nil, prepared, err
	}
	if hosts != "" {
		on(api.Event{Step: "Connecting to the jump host", Detail: hosts, Done: true})
	}
	if prepared.Credential, err = c.Login(ctx, a.pluginTerminal()); err != nil {
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

// timeout returns the time limit for the first answer of the API server; 0: none.
func (k *kubeFlags) timeout() (time.Duration, error) {
	timeout, err := clientcmd.ParseTimeout(k.in.Overrides.Timeout)
	if err != nil {
		return 0, api.Errorf(api.ExitUsage, "--request-timeout: %q is not a duration", k.in.Overrides.Timeout).
			WithHint("write it like 10s or 1m; 0 sets no limit")
	}
	return timeout, nil
}

// load returns a client for the cluster that the flags select. It runs no credential plugin; the requests of the client
// do, without a prompt.
func (k *kubeFlags) load(a *app) (*client.Cluster, client.Prepared, error) {
	prepared, err := k.prepare(a)
	if err != nil {
		return nil, client.Prepared{}, err
	}
	c, err := a.loadCluster(prepared)
	return c, prepared, err
}

func (a *app) loadCluster(prepared client.Prepared) (*client.Cluster, error) {
	return client.Load(prepared.Kubeconfig, client.Options{Logger: a.log})
}

// pluginTerminal returns the terminal on which a credential plugin can ask the user.
func (a *app) pluginTerminal() client.Terminal {
	t := client.Terminal{Stdin: term.File(a.In)}
	if f := term.File(a.Errout); f != nil {
		t.Stderr = f
	} else if t.Stdin != nil {
		t.Stderr = a.Errout
	}
	return t
}
