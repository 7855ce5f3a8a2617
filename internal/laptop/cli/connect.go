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
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/cli/term"
)

type connectOptions struct {
	app        *app
	flags      connectFlags
	foreground bool
	socks      string // address of the proxy; empty: none
	output     *term.Format
}

func newConnect(a *app) *cobra.Command {
	o := &connectOptions{app: a, output: term.NewObjectFormat("text")}
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
		RunE: func(cmd *cobra.Command, _ []string) error { return a.Report(cmd.Context(), o.output, o.connect) },
	}
	o.flags.addTo(cmd, a, config.KeyMetricsListen)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "connect in this process, without a daemon, until Ctrl-C")
	cmd.Flags().StringVar(&o.socks, "socks", "",
		"loopback address and port at which to serve a SOCKS5 and HTTP proxy until Ctrl-C; only programs that use it "+
			"reach the cluster; needs no root and changes nothing on this machine")
	o.output.AddTo(cmd)
	return cmd
}

// connect makes the connection and prints it. quiet stops the progress display.
func (o *connectOptions) connect(ctx context.Context, on func(api.Event), quiet func()) error {
	if o.socks != "" {
		return o.asProxy(ctx, on, quiet)
	}
	o.flags.here = o.foreground
	req, err := o.flags.request(ctx, o.app, on)
	if err != nil {
		return err
	}
	var c *api.Connection
	err = o.flags.consenting(o.app, &req, o.output, quiet).run(ctx, on, func(on func(api.Event)) (err error) {
		if o.foreground {
			return o.inForeground(ctx, req, on)
		}
		c, err = o.post(ctx, req, on, quiet)
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
	if o.output.ForPeople() {
		printConnected(o.app.Out, c)
		return nil
	}
	object := *c
	object.TypeMeta = api.Type(api.KindConnection)
	return o.output.PrintResult(o.app.Out, object, "connection/"+c.ID)
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
			if o.output.ForPeople() {
				fmt.Fprintln(o.app.Errout, "Ctrl-C disconnects.")
			}
		}
	}, failed
}

// post sends the request to the daemon. At Ctrl-C it returns when the daemon has cleaned up.
func (o *connectOptions) post(
	ctx context.Context, req api.ConnectRequest, on func(api.Event), quiet func(),
) (*api.Connection, error) {
	d, err := o.app.daemon()
	if err != nil {
		return nil, err
	}
	c, err := d.Connect(ctx, req, on, quiet)
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
	fmt.Fprintf(w, "  networks  %s through %s\n", cmp.Or(api.Join(c.CIDRs), "none"), through)
	fmt.Fprintf(w, "  names     NAME, NAME.NAMESPACE and *.%s, by %s\n",
		strings.Join(slices.Concat([]string{c.DNS.Domain}, c.DNS.ExtraDomains), ", *."), c.DNS.Mode)
	if c.SOCKS != nil {
		printProxy(w, c.SOCKS)
	}
	term.PrintEach(w, "checked", api.Texts(c.Checks, term.CheckText)...)
	term.PrintEach(w, "warning", c.Warnings...)
}

// connectFlags select the cluster and the settings of a connection.
type connectFlags struct {
	kube    kubeFlags
	upgrade bool
	here    bool // this process connects, and not the daemon

	// request sets these.
	cluster *client.Cluster
	cfg     config.Config
}

// consenting completes the Consent of req, which request returned.
func (f *connectFlags) consenting(a *app, req *api.ConnectRequest, output *term.Format, quiet func()) consenting {
	return consenting{
		app: a, cluster: f.cluster, consent: &req.Consent, yes: f.cfg.Yes, batch: !output.ForPeople(), quiet: quiet,
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
		config.AddFlags(cmd, slices.Concat(config.ConnectionKeys(), config.ObjectKeys(), []config.Key{config.KeyYes},
			more)...)
		flags.BoolVar(&f.upgrade, "upgrade", false,
			"replace a traffic manager of another version; interrupts the connections of all users")
	})
}

// request builds the request from the settings and the kubeconfig, after the API server has answered.
func (f *connectFlags) request(ctx context.Context, a *app, on func(api.Event)) (api.ConnectRequest, error) {
	prepare := func(ctx context.Context, cfg config.Config, l login) {
		if d, err := a.daemon(); err == nil {
			d.Prepare(ctx, api.ConnectRequest{
				Kubeconfig: l.Kubeconfig, Credential: l.Credential, Namespace: l.Prepared.Namespace,
				ConnectSettings: cfg.ConnectSettings,
			})
		}
	}
	if f.here {
		prepare = nil
	}
	cfg, c, prepared, err := f.kube.resolve(ctx, a, on, prepare)
	if err != nil {
		return api.ConnectRequest{}, err
	}
	f.cluster, f.cfg = c, cfg
	return api.ConnectRequest{
		Kubeconfig: prepared.Kubeconfig, Credential: prepared.Credential, Context: prepared.Context,
		Namespace: prepared.Namespace, Upgrade: f.upgrade, ConnectSettings: cfg.ConnectSettings,
		Settings: cfg.Settings(),
	}, nil
}

// resolve logs in and returns the settings, with the client defaults of the cluster. It warns about defaults that it
// cannot use. While it waits for the API server, it calls prepare, unless that is nil, with the settings before the
// defaults.
func (k *kubeFlags) resolve(ctx context.Context, a *app, on func(api.Event),
	prepare func(context.Context, config.Config, login)) (config.Config, *client.Cluster, client.Prepared, error) {
	cfg, err := k.settings(a)
	if err != nil {
		return cfg, nil, client.Prepared{}, err
	}
	var defaults install.Defaults
	var failed error
	c, prepared, err := k.loginBeside(ctx, a, on, cfg.ManagerNamespace,
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

// settings returns the settings, with the flags that were set.
func (k *kubeFlags) settings(a *app) (config.Config, error) {
	paths, err := a.paths()
	if err != nil {
		return config.Config{}, err
	}
	cfg, err := config.Load(paths.ConfigFile, a.lookup)
	if err == nil {
		err = cfg.ApplyFlags(k.cmd.Flags())
	}
	if err != nil {
		return config.Config{}, err
	}
	return cfg, cfg.CheckDomains()
}
