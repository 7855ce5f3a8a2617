package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
)

type connectOptions struct {
	app        *app
	kube       kubeFlags
	settings   settingFlags
	upgrade    bool
	foreground bool
	output     *format
}

func newConnect(a *app) *cobra.Command {
	o := &connectOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "connect",
		Short: "Reach pods, Services and DNS of a cluster from this machine",
		Long: "Connect puts this machine on the network of a cluster, until `kubevpn disconnect`. It installs the\n" +
			"traffic manager in the cluster if it is not there, asks for sudo if it must, and says \"Connected\" once\n" +
			"a name, a pod and a Service were reached. Connecting twice to one cluster is one connection.",
		Example: examples(
			"Connect to the current context's cluster", "kubevpn connect",
			"Another context, and a namespace in which short names are looked up first", "kubevpn connect --context staging -n shop",
			"A cluster that pulls images from its own registry", "kubevpn connect --image registry.example/kubevpn:1.2.3",
			"Whole IP packets to the cluster, or an error that says why not", "kubevpn connect --netstack system",
			"A network behind the cluster too, but not this part of it", "kubevpn connect --extra-cidr 10.20.0.0/16 --exclude-cidr 10.20.30.0/24",
			"Without a daemon, until Ctrl-C (as root)", "sudo -E kubevpn connect --foreground",
			"For a script", "kubevpn connect -o json",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.kube.addTo(cmd, a)
	o.settings.addTo(cmd, config.KeyManagerNamespace, config.KeyImage, config.KeyNetstack, config.KeyTransport, config.KeyScheduler,
		config.KeyExtraCIDRs, config.KeyExcludeCIDRs)
	cmd.Flags().BoolVar(&o.upgrade, "upgrade", false, "replace a traffic manager of another version; ends other users' sessions")
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "stay in this process until Ctrl-C; needs no daemon")
	o.output.addTo(cmd)
	return cmd
}

func (o *connectOptions) run(ctx context.Context) error {
	p := o.app.newProgress()
	if o.output.value == "json" {
		p = jsonLines{o.app.out}
	}
	defer p.stop()
	told := false
	on := func(e api.Event) {
		told = told || e.Error != nil
		p.show(e)
	}
	err := o.connect(ctx, on, p.stop)
	p.stop()
	if err != nil && o.output.value == "json" && !told { // one line has the end of it, whatever it was
		p.show(api.Event{Error: o.asError(ctx, err)})
	}
	return err
}

func (o *connectOptions) asError(ctx context.Context, err error) *api.Error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return api.Errorf(api.ExitInterrupted, "interrupted")
	}
	return api.AsError(err)
}

// connect makes the connection and prints it. quiet takes moving things off the terminal.
func (o *connectOptions) connect(ctx context.Context, on func(api.Event), quiet func()) error {
	req, err := o.request()
	if err != nil {
		return err
	}
	if o.foreground {
		return o.inForeground(ctx, req, on)
	}
	c, err := o.viaDaemon(ctx, req, on, quiet)
	if err != nil {
		return err
	}
	quiet()
	if o.output.value == "text" {
		printConnected(o.app.out, c)
	}
	return nil
}

// request is what the user asks for, as flags, environment, file and kubeconfig say.
func (o *connectOptions) request() (api.ConnectRequest, error) {
	cfg, err := o.settings.load(o.app)
	if err != nil {
		return api.ConnectRequest{}, err
	}
	prepared, err := o.kube.prepare(o.app)
	if err != nil {
		return api.ConnectRequest{}, err
	}
	return api.ConnectRequest{
		Kubeconfig: prepared.Kubeconfig, Context: prepared.Context, Namespace: prepared.Namespace,
		ManagerNamespace: cfg.ManagerNamespace, Image: cfg.Image, Upgrade: o.upgrade,
		Netstack: cfg.Netstack, Transport: cfg.Transport, Scheduler: cfg.Scheduler, ExtraCIDRs: cfg.ExtraCIDRs, ExcludeCIDRs: cfg.ExcludeCIDRs,
	}, nil
}

func (o *connectOptions) inForeground(ctx context.Context, req api.ConnectRequest, on func(api.Event)) error {
	paths, err := o.app.paths()
	if err != nil {
		return err
	}
	return o.app.Foreground(ctx, paths, req, func(e api.Event) {
		on(e)
		if c := e.Connection; c != nil && c.Status == api.StatusConnected && o.output.value == "text" {
			printConnected(o.app.out, c)
			fmt.Fprintln(o.app.errout, "Ctrl-C disconnects.")
		}
	})
}

// viaDaemon asks the daemon, and brings it what it lacks: itself, or a helper.
func (o *connectOptions) viaDaemon(ctx context.Context, req api.ConnectRequest, on func(api.Event), quiet func()) (*api.Connection, error) {
	const tries = 4 // a daemon or a helper may end by itself in between, once each
	for try := 1; ; try++ {
		client, err := o.app.daemon(ctx)
		if err != nil {
			return nil, err
		}
		id := ""
		c, err := client.stream(ctx, api.PathConnect, req, func(begun string) { id = begun }, on)
		switch {
		case err == nil && c == nil:
			return nil, api.Errorf(api.ExitDaemon, "the daemon gave no answer").WithHint("`kubevpn logs` may tell why")
		case err == nil:
			return c, nil
		case ctx.Err() != nil:
			if err := o.settle(ctx, client, id, on); err != nil {
				return nil, api.Errorf(api.ExitInterrupted, "interrupted, and cleaning up was not seen to end: %w", err).
					WithHint("`kubevpn status` shows what is there; `kubevpn quit` ends it")
			}
			return nil, ctx.Err()
		case errors.Is(err, errNeedsHelper) && try < tries:
			quiet() // sudo may ask for a password
			// A daemon that ended meanwhile is seen, and replaced, at the next try.
			if err := o.app.newHelper(ctx, client); err != nil && !errors.Is(err, errNoDaemon) {
				return nil, err
			}
		case errors.Is(err, errNoDaemon) && try < tries:
			if err := client.gone(ctx); err != nil {
				return nil, err
			}
		case errors.Is(err, errNeedsHelper), errors.Is(err, errNoDaemon):
			return nil, api.Errorf(api.ExitDaemon, "%w, again and again", err).WithHint("`kubevpn logs` may tell why")
		default:
			return nil, err
		}
	}
}

// settle waits until an interrupted attempt has been cleaned up, which the daemon does by itself.
func (o *connectOptions) settle(ctx context.Context, c *client, id string, on func(api.Event)) error {
	if id == "" {
		return nil // it had not begun
	}
	const step = "Interrupted: cleaning up"
	on(api.Event{Step: step})
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	for {
		status, err := c.status(ctx)
		if errors.Is(err, errNoDaemon) {
			err = nil // it goes when nothing is left
		}
		if err != nil {
			return err
		}
		var now api.ConnectionStatus
		for _, other := range status.Connections {
			if other.ID == id {
				now = other.Status
			}
		}
		switch now {
		case api.StatusConnecting, api.StatusDisconnecting:
			pause(ctx, pollInterval)
		case api.StatusConnected:
			on(api.Event{Warning: "it is connected all the same (just before, or another command waits for it): `kubevpn disconnect " + id + "` ends it"})
			return nil
		default:
			on(api.Event{Step: step, Done: true})
			return nil
		}
	}
}

// printConnected is the result of connect for people.
func printConnected(w io.Writer, c *api.Connection) {
	fmt.Fprintf(w, "Connected to %s, namespace %s (%s)\n", c.Cluster, c.Namespace, c.ID)
	if c.Netstack != "" {
		fmt.Fprintf(w, "  netstack  %s: %s\n", c.Netstack, c.NetstackReason)
	}
	fmt.Fprintf(w, "  networks  %s through %s\n", orNone(join(c.CIDRs)), c.Device)
	fmt.Fprintf(w, "  names     NAME, NAME.NAMESPACE and *.%s, by %s\n", c.DNS.Domain, c.DNS.Mode)
	for _, check := range c.Checks {
		fmt.Fprintf(w, "  checked   %s %s: %s\n", check.What, check.Target, check.Seen)
	}
	for _, warning := range c.Warnings {
		fmt.Fprintf(w, "  warning   %s\n", warning)
	}
}

func join(ps []netip.Prefix) string {
	var s []string
	for _, p := range ps {
		s = append(s, p.String())
	}
	return strings.Join(s, ", ")
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// kubeFlags choose the cluster, as kubectl's do.
type kubeFlags struct{ in cluster.Inputs }

func (k *kubeFlags) addTo(cmd *cobra.Command, a *app) {
	cmd.Flags().StringVar(&k.in.Kubeconfig, "kubeconfig", "", "path of the kubeconfig (default $KUBECONFIG, else ~/.kube/config)")
	cmd.Flags().StringVar(&k.in.Context, "context", "", "context of the kubeconfig (default its current one)")
	cmd.Flags().StringVarP(&k.in.Namespace, "namespace", "n", "", "namespace (default the context's)")
	completeWith(cmd, "context", k.completeContexts)
	completeWith(cmd, "namespace", k.completeNamespaces(a))
}

func (k *kubeFlags) prepare(a *app) (cluster.Prepared, error) {
	in := k.in
	in.Environ, in.Executable = a.environ, a.executable
	return cluster.Prepare(in)
}

// settingFlags are the flags of settings that the file and the environment may settle too.
type settingFlags struct {
	cmd  *cobra.Command
	keys []config.Key
}

func (s *settingFlags) addTo(cmd *cobra.Command, keys ...config.Key) {
	s.cmd, s.keys = cmd, keys
	defaults := config.Default()
	for _, key := range keys {
		name, flags := key.FlagName(), cmd.Flags()
		switch key {
		case config.KeyImage:
			flags.String(name, defaults.Image, "image of the traffic manager")
		case config.KeyManagerNamespace:
			flags.String(name, "", "namespace of the traffic manager (default \"kubevpn\", else the namespace in use)")
		case config.KeyNetstack:
			flags.String(name, defaults.Netstack, "how packets travel: "+strings.Join(config.Netstacks(), ", "))
			complete(cmd, name, config.Netstacks()...)
		case config.KeyTransport:
			flags.String(name, defaults.Transport, "way to the traffic manager: "+strings.Join(config.Transports(), ", "))
			complete(cmd, name, config.Transports()...)
		case config.KeyScheduler:
			flags.String(name, defaults.Scheduler, "how a Service's endpoint is chosen: "+strings.Join(config.Schedulers(), ", "))
			complete(cmd, name, config.Schedulers()...)
		case config.KeyExtraCIDRs:
			flags.StringSlice(name, nil, "network to route into the cluster besides those found; may be repeated")
		case config.KeyExcludeCIDRs:
			flags.StringSlice(name, nil, "network not to route into the cluster; may be repeated")
		}
	}
}

// load is the settings with the flags that were given.
func (s *settingFlags) load(a *app) (config.Config, error) {
	paths, err := a.paths()
	if err != nil {
		return config.Config{}, err
	}
	cfg, err := config.Load(paths.ConfigFile, a.lookup)
	if err != nil {
		return config.Config{}, err
	}
	for _, key := range s.keys {
		flag := s.cmd.Flags().Lookup(key.FlagName())
		if !flag.Changed {
			continue
		}
		values := []string{flag.Value.String()}
		if list, ok := flag.Value.(interface{ GetSlice() []string }); ok {
			values = list.GetSlice()
		}
		if err := cfg.SetFlag(key, values); err != nil {
			return config.Config{}, err
		}
	}
	return cfg, nil
}
