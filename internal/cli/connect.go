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
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/install"
)

type connectOptions struct {
	app        *app
	flags      connectFlags
	foreground bool
	socks      string // address of the proxy; empty: none
	output     *format
}

func newConnect(a *app) *cobra.Command {
	o := &connectOptions{app: a, output: newObjectFormat("text")}
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
			"Reach what the cluster's nameservers know, except for a part of it",
			"kubevpn connect --extra-domain corp.test --exclude-domain mail.corp.test",
			"Let other laptops of the same traffic manager connect to a port of this one",
			"kubevpn connect --allow-inbound 8080",
			"Serve a SOCKS5 and HTTP proxy and change nothing on this machine, until Ctrl-C (without root)",
			"kubevpn connect --socks 127.0.0.1:1080",
			"Run without a daemon, until Ctrl-C (as root)", "sudo -E kubevpn connect --foreground",
			"For a script", "kubevpn connect -o json --yes",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.report(cmd.Context(), o.output, o.connect) },
	}
	o.flags.addTo(cmd, a, config.KeyMetricsListen)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "connect in this process, without a daemon, until Ctrl-C")
	cmd.Flags().StringVar(&o.socks, "socks", "",
		"loopback address and port at which to serve a SOCKS5 and HTTP proxy until Ctrl-C; only programs that use it "+
			"reach the cluster; needs no root and changes nothing on this machine")
	o.output.addTo(cmd)
	return cmd
}

// connect makes the connection and prints it. quiet stops the progress display.
func (o *connectOptions) connect(ctx context.Context, on func(api.Event), quiet func()) error {
	if o.socks != "" {
		return o.asProxy(ctx, on, quiet)
	}
	o.flags.here = o.foreground
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
	return o.print(c)
}

// print prints the connection that the command has made.
func (o *connectOptions) print(c *api.Connection) error {
	if o.output.forPeople() {
		printConnected(o.app.out, c)
		return nil
	}
	object := *c
	object.TypeMeta = api.Type(api.KindConnection)
	return o.output.printResult(o.app.out, object, "connection/"+c.ID)
}

func (o *connectOptions) inForeground(ctx context.Context, req api.ConnectRequest, on func(api.Event)) error {
	on, printing := o.printing(on)
	return errors.Join(o.app.Hold(ctx, api.InterceptRequest{Connect: req}, nil, nil, on), *printing)
}

// printing returns a function that calls on, and prints the connection once it is established. The second result points
// to the error of printing.
func (o *connectOptions) printing(on func(api.Event)) (func(api.Event), *error) {
	failed := new(error)
	return func(e api.Event) {
		if e.Held {
			return // the event with the connection says it
		}
		on(e)
		if c := e.Connection; c != nil && c.Status == api.StatusConnected {
			*failed = errors.Join(*failed, o.print(c))
			if o.output.forPeople() {
				fmt.Fprintln(o.app.errout, "Ctrl-C disconnects.")
			}
		}
	}, failed
}

// post sends the request to the daemon. At Ctrl-C it returns when the daemon has cleaned up.
func (o *connectOptions) post(
	ctx context.Context, client *client, req api.ConnectRequest, on func(api.Event),
) (*api.Connection, error) {
	c, err := client.hold(ctx, api.PathConnect, req, on)
	if c != nil && ctx.Err() != nil {
		on(api.Event{Warning: "the cluster is still connected: the connection was already established; " +
			"`kubevpn disconnect " + c.ID + "` ends it"})
	}
	return c, err
}

// printConnected prints the result of connect as text.
func printConnected(w io.Writer, c *api.Connection) {
	fmt.Fprintf(w, "Connected to %s, namespace %s (%s)\n", c.Cluster, c.Namespace, c.ID)
	if c.Netstack != "" {
		fmt.Fprintf(w, "  netstack  %s: %s\n", c.Netstack, c.NetstackReason)
	}
	through := c.Device
	if c.SOCKS != nil {
		through = "the proxy"
	}
	fmt.Fprintf(w, "  networks  %s through %s\n", cmp.Or(join(c.CIDRs), "none"), through)
	fmt.Fprintf(w, "  names     NAME, NAME.NAMESPACE and *.%s, by %s\n",
		strings.Join(slices.Concat([]string{c.DNS.Domain}, c.DNS.ExtraDomains), ", *."), c.DNS.Mode)
	if c.SOCKS != nil {
		printProxy(w, c.SOCKS)
	}
	for _, check := range c.Checks {
		fmt.Fprintf(w, "  checked   %s %s: %s\n", check.What, check.Target, check.Seen)
	}
	for _, warning := range c.Warnings {
		fmt.Fprintf(w, "  warning   %s\n", warning)
	}
}

func join[T any](list []T) string {
	var s []string
	for _, p := range list {
		s = append(s, fmt.Sprint(p))
	}
	return strings.Join(s, ", ")
}

// connectFlags select the cluster and the settings of a connection.
type connectFlags struct {
	kube     kubeFlags
	settings settingFlags
	upgrade  bool
	here     bool // this process connects, and not the daemon

	// request sets these.
	cluster *cluster.Cluster
	yes     bool // from the settings
}

// consenting completes the Consent of req, which request returned.
func (f *connectFlags) consenting(a *app, req *api.ConnectRequest, output *format, quiet func()) consenting {
	return consenting{
		app: a, cluster: f.cluster, consent: &req.Consent, yes: f.yes, batch: !output.forPeople(), quiet: quiet,
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
	section(cmd, sectionConnection, func(flags *pflag.FlagSet) {
		f.settings.addTo(cmd, slices.Concat(config.ConnectionKeys(), config.ObjectKeys(), []config.Key{config.KeyYes},
			more)...)
		flags.BoolVar(&f.upgrade, "upgrade", false,
			"replace a traffic manager of another version; interrupts the connections of all users")
	})
}

// request builds the request from the settings and the kubeconfig, after the API server has answered.
func (f *connectFlags) request(ctx context.Context, a *app,
	on func(api.Event)) (api.ConnectRequest, config.Config, error) {
	prepare := func(ctx context.Context, cfg config.Config, l login) {
		a.prepare(ctx, api.ConnectRequest{
			Kubeconfig: l.Kubeconfig, Credential: l.Credential, Namespace: l.Prepared.Namespace,
			ManagerNamespace: cfg.ManagerNamespace,
		})
	}
	if f.here {
		prepare = nil
	}
	cfg, c, prepared, err := f.settings.resolve(ctx, a, &f.kube, on, prepare)
	if err != nil {
		return api.ConnectRequest{}, cfg, err
	}
	f.cluster, f.yes = c, cfg.Yes
	return api.ConnectRequest{
		Kubeconfig: prepared.Kubeconfig, Credential: prepared.Credential, Context: prepared.Context,
		Namespace:        prepared.Namespace,
		ManagerNamespace: cfg.ManagerNamespace, Image: cfg.Image, Upgrade: f.upgrade,
		Netstack: cfg.Netstack, Transport: cfg.Transport, Scheduler: cfg.Scheduler, ExtraCIDRs: cfg.ExtraCIDRs,
		ExcludeCIDRs: cfg.ExcludeCIDRs, ExtraDomains: cfg.ExtraDomains, ExcludeDomains: cfg.ExcludeDomains,
		AllowInbound: cfg.AllowInbound, Objects: cfg.Objects, Settings: cfg.Settings(),
	}, cfg, nil
}

// settingFlags are flags for settings that the configuration file and the environment can also set.
type settingFlags struct {
	cmd  *cobra.Command
	keys []config.Key
}

func (s *settingFlags) addTo(cmd *cobra.Command, keys ...config.Key) {
	s.cmd, s.keys = cmd, keys
	flags, defaults := cmd.Flags(), config.Default()
	for _, key := range keys {
		name := key.FlagName()
		choice := func(allowed []string, usage string) { // the first is the default
			flags.String(name, allowed[0], usage+": "+strings.Join(allowed, ", "))
			complete(cmd, name, allowed...)
		}
		list := func(usage string) { flags.StringSlice(name, nil, usage+"; may be repeated") }
		switch key {
		case config.KeyImage:
			flags.String(name, defaults.Image, "image of the traffic manager, if this command installs it")
		case config.KeyManagerNamespace:
			flags.String(name, "",
				"namespace of the traffic manager (default: \"kubevpn\", else the current namespace)")
		case config.KeyNetstack:
			choice(config.Netstacks(), "how packets reach the cluster")
		case config.KeyTransport:
			choice(config.Transports(), "transport to the traffic manager")
		case config.KeyMode:
			choice(config.Modes(), "how the traffic agent is added to the pods")
		case config.KeyScheduler:
			choice(config.Schedulers(), "how the traffic manager chooses an endpoint of a Service")
		case config.KeyExtraCIDRs:
			list("additional network to route into the cluster")
		case config.KeyExcludeCIDRs:
			list("network that is not routed into the cluster")
		case config.KeyExtraDomains:
			list("domain whose names cluster DNS answers and whose addresses are routed into the cluster")
		case config.KeyExcludeDomains:
			list("domain whose names cluster DNS never answers")
		case config.KeyAllowInbound:
			list("port of this machine that other laptops may connect to: 8080, 8080/udp or all")
		case config.KeyYes:
			flags.BoolP(name, "y", false,
				"give your consent without a question, for example to a traffic manager that another user installed")
		case config.KeyRequireMatch:
			list("reject an intercept without --headers, --path and --method: true, false, NAMESPACE or " +
				"NAMESPACE=false")
			flags.Lookup(name).NoOptDefVal = "true"
		case config.KeyRedact:
			list("header whose values kubevpn hides, in addition to secrets that it recognizes; none: hide nothing")
		case config.KeyMetricsListen:
			flags.String(name, "", "loopback address and port at which the daemon serves /metrics, for Prometheus, "+
				"until 'kubevpn quit'")
		case config.KeyLabels:
			list("label NAME=VALUE of the objects that kubevpn creates, if a policy demands it")
		case config.KeyAnnotations:
			list("annotation NAME=VALUE of the objects that kubevpn creates")
		case config.KeyResources:
			list("limits.NAME=QUANTITY or requests.NAME=QUANTITY of the traffic manager, if this command installs " +
				"it, and of agents in sidecar mode, such as limits.cpu=500m")
		case config.KeySSHJump:
			list("SSH jump host before the API server, [USER@]HOST[:PORT]")
		}
	}
}

// resolve logs in and returns the settings, with the client defaults of the cluster. It warns about defaults that it
// cannot use. While it waits for the API server, it calls prepare, unless that is nil, with the settings before the
// defaults.
func (s *settingFlags) resolve(ctx context.Context, a *app, kube *kubeFlags, on func(api.Event),
	prepare func(context.Context, config.Config, login)) (config.Config, *cluster.Cluster, cluster.Prepared, error) {
	cfg, err := s.load(a)
	if err != nil {
		return cfg, nil, cluster.Prepared{}, err
	}
	var defaults install.Defaults
	var failed error
	c, prepared, err := kube.loginBeside(ctx, a, on, cfg.ManagerNamespace,
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
	for _, key := range append(slices.Clip(s.keys), config.KeySSHJump) { // kubeFlags defines the last one
		flag := s.cmd.Flags().Lookup(key.FlagName())
		if flag == nil || !flag.Changed {
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
	return cfg, cfg.CheckDomains()
}
