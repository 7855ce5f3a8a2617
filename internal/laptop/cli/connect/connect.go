package connect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type connectOptions struct {
	f          *command.Factory
	flags      command.ConnectionFlags
	foreground bool
	attached   bool // until Ctrl-C, by the daemon
	reconnect  bool
	name       string
	socks      string // address of the proxy; empty: none
	headers    []string
	output     *term.Format
}

func newConnect(f *command.Factory) *cobra.Command {
	o := &connectOptions{f: f, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "connect",
		Short: "Reach pods, Services and DNS of a cluster from this machine",
		Long: "Connect this machine to the network of a cluster until `kubevpn disconnect`. The command installs\n" +
			"the traffic manager in the cluster if necessary, and uses sudo if necessary. It prints \"Connected\"\n" +
			"after it has reached a name, a pod and a Service. If the cluster is already connected, the command\n" +
			"uses the existing connection, or fails if a flag asks for another one.",
		Example: command.Examples(
			"Connect to the current context's cluster", "kubevpn connect",
			"Use another context, and look short names up in another namespace first",
			"kubevpn connect --context staging -n shop",
			"Install the traffic manager from your own registry",
			"kubevpn connect --image registry.example/kubevpn:1.2.3",
			"Send whole IP packets to the cluster, or fail", "kubevpn connect --netstack system",
			"Connect anew with other settings: the connection to the cluster, its proxies and clones end first",
			"kubevpn connect --netstack system --reconnect",
			"Also route a network behind the cluster, except a part of it",
			"kubevpn connect --extra-cidr 10.20.0.0/16 --exclude-cidr 10.20.30.0/24",
			"Reach what the cluster's nameservers know, except for a part of it",
			"kubevpn connect --extra-domain corp.test --exclude-domain mail.corp.test",
			"Let other laptops of the same traffic manager connect to a port of this one",
			"kubevpn connect --allow-inbound 8080",
			"Serve a SOCKS5 and HTTP proxy and change nothing on this machine, until Ctrl-C (without root)",
			"kubevpn connect --socks 127.0.0.1:1080",
			"Add a header to the requests of a browser that uses the proxy",
			"kubevpn connect --socks 127.0.0.1:1080 --add-header x-user=me",
			"Run without a daemon, until Ctrl-C (as root)", "sudo -E kubevpn connect --foreground",
			"Connect with the identity of a workload's pods: NetworkPolicies, mesh and allow-lists see them",
			"kubevpn connect -n shop --via deployment/web",
			"For a script", "kubevpn connect -o json --yes",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), o.output, o.connect) },
	}
	o.flags.AddTo(cmd, f, config.KeyMetricsListen)
	o.flags.AddVia(cmd)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "connect in this process, without a daemon, until Ctrl-C")
	cmd.Flags().StringVar(&o.socks, "socks", "",
		"loopback address and port at which to serve a SOCKS5 and HTTP proxy until Ctrl-C; only programs that use it "+
			"reach the cluster; needs no root and changes nothing on this machine")
	cmd.Flags().StringArrayVar(&o.headers, "add-header", nil,
		"NAME=VALUE that the proxy of --socks adds to requests for http URLs of the cluster, so that a browser's "+
			"requests match an intercept; may be repeated")
	cmd.Flags().StringVar(&o.name, "name", "",
		"label under which names always mean this cluster, NAME.NAMESPACE.LABEL (default: the context's name)")
	cmd.Flags().BoolVar(&o.reconnect, "reconnect", false,
		"end the connection to this cluster first, with its proxies and clones, if there is one")
	cmd.Flags().BoolVar(&o.attached, "attached", false, "end the connection with this command, if it has connected")
	cmd.Flag("attached").Hidden = true // for `kubevpn up`
	o.output.AddTo(cmd)
	return cmd
}

// connect makes the connection and prints it. quiet stops the progress display.
func (o *connectOptions) connect(ctx context.Context, on func(api.Event), quiet func()) error {
	if o.reconnect && (o.foreground || o.socks != "") {
		return api.Errorf(api.ExitUsage,
			"--reconnect is for the daemon's connections, not for --foreground and --socks").
			WithHint("leave --reconnect out")
	}
	headers, err := o.added()
	if err != nil {
		return err
	}
	var proxy net.Listener
	if o.socks != "" { // before the login, which may ask the user
		if proxy, err = o.listen(); err != nil {
			return err
		}
		defer proxy.Close()
	}
	o.flags.Here, o.flags.Own = o.foreground || proxy != nil, proxy != nil
	req, err := o.flags.Request(ctx, on)
	if err != nil {
		return err
	}
	req.Reconnect, req.Name, req.AddHeaders = o.reconnect, o.name, headers
	if o.flags.Here {
		return o.hold(ctx, req, proxy, on, quiet)
	}
	if o.attached {
		return o.attach(ctx, req, on, quiet)
	}
	var c *api.Connection
	err = o.flags.Consenting(&req, o.output, quiet).Run(ctx, on, func(on func(api.Event)) (err error) {
		c, err = o.f.Daemon().Connect(ctx, req, on, quiet)
		if c != nil && ctx.Err() != nil {
			on(api.Event{Warning: "the cluster is still connected: the connection was already established; " +
				"`kubevpn disconnect " + c.ID + "` ends it"})
		}
		return err
	})
	if err != nil {
		return err
	}
	quiet()
	return o.print(c)
}

// attach has the daemon keep the connection until ctx ends.
func (o *connectOptions) attach(ctx context.Context, req api.ConnectRequest, on func(api.Event), quiet func()) error {
	err := o.flags.Consenting(&req, o.output, quiet).Run(ctx, on, func(on func(api.Event)) error {
		return o.f.Daemon().Intercept(ctx, api.InterceptRequest{Connect: req, Attached: true}, on, quiet)
	})
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return nil
	}
	return err
}

// print prints the connection that the command has made.
func (o *connectOptions) print(c *api.Connection) error {
	if o.output.ForPeople() {
		printConnected(o.f.Out, c)
		return nil
	}
	object := *c
	object.TypeMeta = api.Type(api.KindConnection)
	return o.output.PrintResult(o.f.Out, object, "connection/"+c.ID)
}

// hold keeps a connection in this process until Ctrl-C, and prints the connection once it is established.
func (o *connectOptions) hold(ctx context.Context, req api.ConnectRequest, proxy net.Listener, on func(api.Event),
	quiet func()) error {
	var printing error
	show := func(e api.Event) {
		if e.Held {
			return // the event with the connection says it
		}
		on(e)
		if c := e.Connection; c != nil && c.Status == api.StatusConnected {
			printing = errors.Join(printing, o.print(c))
			if o.output.ForPeople() {
				fmt.Fprintln(o.f.Errout, "Ctrl-C disconnects.")
			}
		}
	}
	err := o.flags.Hold(ctx, api.InterceptRequest{Connect: req}, nil, proxy, o.output, show, quiet)
	return errors.Join(err, printing)
}

// viaText describes from where connections leave.
func viaText(v *api.Via) string {
	if v.Pod == "" {
		return fmt.Sprintf("through no pod of %s: %s", v.Workload, v.Error)
	}
	return fmt.Sprintf("through pod %s of %s", v.Pod, v.Workload)
}

// printConnected prints the result of connect as text.
func printConnected(w io.Writer, c *api.Connection) {
	fmt.Fprintf(w, "Connected to %s, namespace %s (%s)\n", c.Cluster, c.Namespace, c.ID)
	if c.Netstack != "" {
		fmt.Fprintf(w, "  netstack  %s: %s\n", c.Netstack, c.NetstackReason)
	}
	if c.Via != nil {
		fmt.Fprintf(w, "  leaving   %s\n", viaText(c.Via))
	}
	through := c.Device
	if c.SOCKS != nil {
		through = "the proxy"
	}
	fmt.Fprintf(w, "  networks  %s through %s\n", cmp.Or(api.Join(c.CIDRs), "none"), through)
	for _, m := range c.Mappings {
		fmt.Fprintf(w, "  mapped    %v of the cluster is %v here\n", m.Cluster, m.Local)
	}
	namespace, always := "NAMESPACE", ""
	if c.DNS.Limited {
		namespace = c.Namespace
	}
	if c.DNS.Alias != "" {
		always = ", NAME." + namespace + "." + c.DNS.Alias
	}
	fmt.Fprintf(w, "  names     NAME, NAME.%s%s and *.%s, by %s\n", namespace, always,
		strings.Join(slices.Concat([]string{c.DNS.Domain}, c.DNS.ExtraDomains), ", *."), c.DNS.Mode)
	if c.SOCKS != nil {
		printProxy(w, c.SOCKS)
	}
	term.PrintEach(w, "checked", api.Texts(c.Checks, term.CheckText)...)
	term.PrintEach(w, "warning", c.Warnings...)
}
