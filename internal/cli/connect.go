package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/install"
)

type connectOptions struct {
	app        *app
	flags      connectFlags
	foreground bool
	output     *format
}

func newConnect(a *app) *cobra.Command {
	o := &connectOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "connect",
		Short: "Reach pods, Services and DNS of a cluster from this machine",
		Long: "Connect this machine to the network of a cluster until `kubevpn disconnect`. The command installs\n" +
			"the traffic manager in the cluster if necessary, and uses sudo if necessary. It prints \"Connected\"\n" +
			"after it has reached a name, a pod and a Service. If the cluster is already connected, the command\n" +
			"uses the existing connection.",
		Example: examples(
			"Connect to the current context's cluster", "kubevpn connect",
			"Use another context, and look short names up in another namespace first",
			"kubevpn connect --context staging -n shop",
			"Install the traffic manager from your own registry",
			"kubevpn connect --image registry.example/kubevpn:1.2.3",
			"Send whole IP packets to the cluster, or fail", "kubevpn connect --netstack system",
			"Also route a network behind the cluster, except a part of it",
			"kubevpn connect --extra-cidr 10.20.0.0/16 --exclude-cidr 10.20.30.0/24",
			"Let other laptops of the same traffic manager connect to a port of this one",
			"kubevpn connect --allow-inbound 8080",
			"Run without a daemon, until Ctrl-C (as root)", "sudo -E kubevpn connect --foreground",
			"For a script", "kubevpn connect -o json",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.report(cmd.Context(), o.output, o.connect) },
	}
	o.flags.addTo(cmd, a)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "connect in this process, without a daemon, until Ctrl-C")
	o.output.addTo(cmd)
	return cmd
}

// connect makes the connection and prints it. quiet stops the progress display.
func (o *connectOptions) connect(ctx context.Context, on func(api.Event), quiet func()) error {
	req, _, err := o.flags.request(ctx, o.app, on)
	if err != nil {
		return err
	}
	var c *api.Connection
	err = o.flags.consenting(o.app, &req, o.output, quiet).run(ctx, on, func(on func(api.Event)) (err error) {
		if o.foreground {
			return o.inForeground(ctx, req, on)
		}
		c, err = o.app.ask(ctx, quiet, func(c *client) (*api.Connection, error) { return o.post(ctx, c, req, on) })
		return err
	})
	if err != nil || o.foreground {
		return err
	}
	quiet()
	if o.output.value == "text" {
		printConnected(o.app.out, c)
	}
	return nil
}

func (o *connectOptions) inForeground(ctx context.Context, req api.ConnectRequest, on func(api.Event)) error {
	return o.app.Foreground(ctx, req, func(e api.Event) {
		on(e)
		if c := e.Connection; c != nil && c.Status == api.StatusConnected && o.output.value == "text" {
			printConnected(o.app.out, c)
			fmt.Fprintln(o.app.errout, "Ctrl-C disconnects.")
		}
	})
}

// post sends the request to the daemon. At Ctrl-C it returns when the daemon has cleaned up.
func (o *connectOptions) post(
	ctx context.Context, client *client, req api.ConnectRequest, on func(api.Event),
) (*api.Connection, error) {
	id := ""
	c, err := client.stream(ctx, api.PathConnect, req, func(begun string) { id = begun }, on)
	if err == nil || ctx.Err() == nil {
		return c, err
	}
	if id == "" {
		return nil, ctx.Err() // the daemon had not begun
	}
	if err := awaitCleanup(ctx, client, id, on); err != nil {
		return nil, api.Errorf(api.ExitInterrupted, "interrupted, and cannot tell whether the cleanup ended: %w", err).
			WithHint("`kubevpn status` shows what is left; `kubevpn quit` ends it")
	}
	return c, ctx.Err()
}

// awaitCleanup waits until the daemon has cleaned up an interrupted attempt, or has ended.
func awaitCleanup(ctx context.Context, c *client, id string, on func(api.Event)) error {
	const step = "Interrupted: cleaning up"
	on(api.Event{Step: step})
	err := poll(context.WithoutCancel(ctx), cleanTimeout, func(ctx context.Context) (bool, error) {
		status, err := c.status(ctx)
		if errors.Is(err, errNoDaemon) { // it ends when nothing is left
			return true, nil
		}
		i := slices.IndexFunc(status.Connections, func(c api.Connection) bool { return c.ID == id })
		if err != nil || i < 0 {
			return true, err
		}
		switch status.Connections[i].Status {
		case api.StatusConnecting, api.StatusDisconnecting:
			return false, nil
		case api.StatusConnected:
			on(api.Event{Warning: "the cluster is still connected: the connection was already established, or " +
				"another command uses it; `kubevpn disconnect " + id + "` ends the connection"})
		}
		return true, nil
	})
	if err == nil {
		on(api.Event{Step: step, Done: true})
	}
	return err
}

// printConnected prints the result of connect as text.
func printConnected(w io.Writer, c *api.Connection) {
	fmt.Fprintf(w, "Connected to %s, namespace %s (%s)\n", c.Cluster, c.Namespace, c.ID)
	if c.Netstack != "" {
		fmt.Fprintf(w, "  netstack  %s: %s\n", c.Netstack, c.NetstackReason)
	}
	fmt.Fprintf(w, "  networks  %s through %s\n", cmp.Or(join(c.CIDRs), "none"), c.Device)
	fmt.Fprintf(w, "  names     NAME, NAME.NAMESPACE and *.%s, by %s\n", c.DNS.Domain, c.DNS.Mode)
	for _, check := range c.Checks {
		fmt.Fprintf(w, "  checked   %s %s: %s\n", check.What, check.Target, check.Seen)
	}
	for _, warning := range c.Warnings {
		fmt.Fprintf(w, "  warning   %s\n", warning)
	}
}

func join[T fmt.Stringer](list []T) string {
	var s []string
	for _, p := range list {
		s = append(s, p.String())
	}
	return strings.Join(s, ", ")
}

// connectFlags select the cluster and the settings of a connection.
type connectFlags struct {
	kube     kubeFlags
	settings settingFlags
	upgrade  bool

	// request sets these.
	cluster *cluster.Cluster
	yes     bool // from the settings
}

// consenting completes the Consent of req, which request returned.
func (f *connectFlags) consenting(a *app, req *api.ConnectRequest, output *format, quiet func()) consenting {
	return consenting{
		app: a, cluster: f.cluster, consent: &req.Consent, yes: f.yes, json: output.value == "json", quiet: quiet,
		find: func(ctx context.Context) error {
			_, err := install.Find(ctx, f.cluster, req.ManagerNamespace, req.Namespace, req.Consent)
			return err
		},
	}
}

// addTo defines the flags, and those of more settings.
func (f *connectFlags) addTo(cmd *cobra.Command, a *app, more ...config.Key) {
	f.addWithoutImage(cmd, a, append([]config.Key{config.KeyImage}, more...)...)
}

// addWithoutImage is addTo for a command whose --image has another meaning. Environment and file can still set the
// image of the traffic manager.
func (f *connectFlags) addWithoutImage(cmd *cobra.Command, a *app, more ...config.Key) {
	f.kube.addTo(cmd, a)
	f.settings.addTo(cmd, append([]config.Key{config.KeyManagerNamespace, config.KeyNetstack, config.KeyTransport,
		config.KeyScheduler, config.KeyExtraCIDRs, config.KeyExcludeCIDRs, config.KeyAllowInbound, config.KeyYes},
		more...)...)
	cmd.Flags().BoolVar(&f.upgrade, "upgrade", false,
		"replace a traffic manager of another version; interrupts the connections of all users")
}

// request builds the request from flags, environment, file and kubeconfig, after the API server has answered.
func (f *connectFlags) request(ctx context.Context, a *app,
	on func(api.Event)) (api.ConnectRequest, config.Config, error) {
	cfg, err := f.settings.load(a)
	if err != nil {
		return api.ConnectRequest{}, cfg, err
	}
	f.yes = cfg.Yes
	c, prepared, err := f.kube.login(ctx, a, on, cfg.ManagerNamespace)
	if err != nil {
		return api.ConnectRequest{}, cfg, err
	}
	f.cluster = c
	return api.ConnectRequest{
		Kubeconfig: prepared.Kubeconfig, Credential: prepared.Credential, Context: prepared.Context,
		Namespace:        prepared.Namespace,
		ManagerNamespace: cfg.ManagerNamespace, Image: cfg.Image, Upgrade: f.upgrade,
		Netstack: cfg.Netstack, Transport: cfg.Transport, Scheduler: cfg.Scheduler, ExtraCIDRs: cfg.ExtraCIDRs,
		ExcludeCIDRs: cfg.ExcludeCIDRs,
		AllowInbound: cfg.AllowInbound,
	}, cfg, nil
}

// kubeFlags select the cluster, like the flags of kubectl.
type kubeFlags struct {
	in             cluster.Inputs
	requestTimeout string
}

func (k *kubeFlags) addTo(cmd *cobra.Command, a *app) {
	k.addClusterTo(cmd)
	cmd.Flags().StringVarP(&k.in.Namespace, "namespace", "n", "", "namespace (default: that of the context)")
	completeWith(cmd, "namespace", k.completeNamespaces(a))
}

// addClusterTo is addTo without the namespace.
func (k *kubeFlags) addClusterTo(cmd *cobra.Command) {
	cmd.Flags().StringVar(&k.in.Kubeconfig, "kubeconfig", "",
		"path of the kubeconfig (default: $KUBECONFIG, else ~/.kube/config)")
	cmd.Flags().StringVar(&k.in.Context, "context", "", "context of the kubeconfig (default: its current context)")
	cmd.Flags().StringVar(&k.requestTimeout, "request-timeout", "10s",
		"time limit for the first answer of the API server, such as 10s or 1m; 0: no limit")
	completeWith(cmd, "context", k.completeContexts)
}

func (k *kubeFlags) prepare(a *app) (cluster.Prepared, error) {
	in := k.in
	in.Environ = a.environ
	return cluster.Prepare(in)
}

// settingFlags are flags for settings that the configuration file and the environment can also set.
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
			flags.String(name, defaults.Image, "image of the traffic manager, if this command installs it")
		case config.KeyManagerNamespace:
			flags.String(name, "",
				"namespace of the traffic manager (default: \"kubevpn\", else the current namespace)")
		case config.KeyNetstack:
			flags.String(name, defaults.Netstack,
				"how packets reach the cluster: "+strings.Join(config.Netstacks(), ", "))
			complete(cmd, name, config.Netstacks()...)
		case config.KeyTransport:
			flags.String(name, defaults.Transport,
				"transport to the traffic manager: "+strings.Join(config.Transports(), ", "))
			complete(cmd, name, config.Transports()...)
		case config.KeyMode:
			flags.String(name, defaults.Mode,
				"how the traffic agent is added to the pods: "+strings.Join(config.Modes(), ", "))
			complete(cmd, name, config.Modes()...)
		case config.KeyScheduler:
			flags.String(name, defaults.Scheduler,
				"how an endpoint of a Service is chosen: "+strings.Join(config.Schedulers(), ", "))
			complete(cmd, name, config.Schedulers()...)
		case config.KeyExtraCIDRs:
			flags.StringSlice(name, nil, "additional network to route into the cluster; may be repeated")
		case config.KeyExcludeCIDRs:
			flags.StringSlice(name, nil, "network that is not routed into the cluster; may be repeated")
		case config.KeyAllowInbound:
			flags.StringSlice(name, nil,
				"port of this machine that other laptops may connect to: 8080, 8080/udp or all; may be repeated")
		case config.KeyYes:
			flags.BoolP(name, "y", false,
				"give your consent without a question, for example to a traffic manager that another user installed")
		}
	}
}

// load returns the settings, with the flags that were set.
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
