package cli

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
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
	o.flags.addTo(cmd, a)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "stay in this process until Ctrl-C; needs no daemon")
	o.output.addTo(cmd)
	return cmd
}

func (o *connectOptions) run(ctx context.Context) error {
	return o.app.report(ctx, o.output, o.connect)
}

// connect makes the connection and prints it. quiet takes moving things off the terminal.
func (o *connectOptions) connect(ctx context.Context, on func(api.Event), quiet func()) error {
	req, _, err := o.flags.request(o.app)
	if err != nil {
		return err
	}
	if o.foreground {
		return o.inForeground(ctx, req, on)
	}
	c, err := o.app.ask(ctx, question{path: api.PathConnect, body: req, on: on, quiet: quiet, interrupted: o.settle})
	if err != nil {
		return err
	}
	quiet()
	if o.output.value == "text" {
		printConnected(o.app.out, c)
	}
	return nil
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

// settle waits until an interrupted attempt has been cleaned up, which the daemon does by itself.
func (o *connectOptions) settle(ctx context.Context, c *client, id string, on func(api.Event)) error {
	return c.settle(ctx, on, "Interrupted: cleaning up", func(status api.Status) bool {
		for _, other := range status.Connections {
			if other.ID != id {
				continue
			}
			switch other.Status {
			case api.StatusConnecting, api.StatusDisconnecting:
				return false
			case api.StatusConnected:
				on(api.Event{Warning: "it is connected all the same (just before, or another command waits for it): `kubevpn disconnect " + id + "` ends it"})
			}
		}
		return true
	})
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

// connectFlags say which connection is meant, and how it is made.
type connectFlags struct {
	kube     kubeFlags
	settings settingFlags
	upgrade  bool
}

// addTo defines the flags, and those of more settings.
func (f *connectFlags) addTo(cmd *cobra.Command, a *app, more ...config.Key) {
	f.addWithoutImage(cmd, a, append([]config.Key{config.KeyImage}, more...)...)
}

// addWithoutImage is addTo for a command whose --image is another: the traffic manager's is as environment and file say.
func (f *connectFlags) addWithoutImage(cmd *cobra.Command, a *app, more ...config.Key) {
	f.kube.addTo(cmd, a)
	f.settings.addTo(cmd, append([]config.Key{config.KeyManagerNamespace, config.KeyNetstack, config.KeyTransport,
		config.KeyScheduler, config.KeyExtraCIDRs, config.KeyExcludeCIDRs}, more...)...)
	cmd.Flags().BoolVar(&f.upgrade, "upgrade", false, "replace a traffic manager of another version; ends other users' sessions")
}

// request is what the user asks for, as flags, environment, file and kubeconfig say.
func (f *connectFlags) request(a *app) (api.ConnectRequest, config.Config, error) {
	cfg, err := f.settings.load(a)
	if err != nil {
		return api.ConnectRequest{}, cfg, err
	}
	prepared, err := f.kube.prepare(a)
	if err != nil {
		return api.ConnectRequest{}, cfg, err
	}
	return api.ConnectRequest{
		Kubeconfig: prepared.Kubeconfig, Context: prepared.Context, Namespace: prepared.Namespace,
		ManagerNamespace: cfg.ManagerNamespace, Image: cfg.Image, Upgrade: f.upgrade,
		Netstack: cfg.Netstack, Transport: cfg.Transport, Scheduler: cfg.Scheduler, ExtraCIDRs: cfg.ExtraCIDRs, ExcludeCIDRs: cfg.ExcludeCIDRs,
	}, cfg, nil
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
		case config.KeyMode:
			flags.String(name, defaults.Mode, "how the agent gets into the pods: "+strings.Join(config.Modes(), ", "))
			complete(cmd, name, config.Modes()...)
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
