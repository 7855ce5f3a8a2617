package workload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/intercept"
)

type proxyOptions struct {
	f          *command.Factory
	workloads  []string
	flags      command.ConnectionFlags
	spec       specFlags
	foreground bool
	socks      string // address of a proxy: this process holds the intercept, without root; empty: the daemon does
	output     *term.Format
}

func newProxy(f *command.Factory) *cobra.Command {
	o := &proxyOptions{f: f, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "proxy TYPE/NAME...",
		Short: "Send the requests of a workload to this machine",
		Long: "Send requests for a workload's pods to a program on this machine, at the same port, until `kubevpn\n" +
			"leave`. Requests that do not match still go to the pods. If this machine disappears, all requests\n" +
			"go to the pods again. The command connects first if necessary. TYPE is a resource type that has\n" +
			"pods, as in kubectl: deployment, statefulset, daemonset, replicaset, pod, service, or a custom\n" +
			"resource with a pod template or a scale subresource.",
		Example: command.Examples(
			"Send all requests for a Deployment to the same ports of this machine", "kubevpn proxy deployment/web",
			"Only your requests, so that others can work on it too", "kubevpn proxy deployment/web --headers x-user=me",
			"Match a regular expression, a path and a method",
			"kubevpn proxy deploy/web --headers 'x-user=~me|you' --path /api --method GET,POST",
			"To another port than the container's, TCP and UDP",
			"kubevpn proxy sts/dns --port 3000:8080 --port udp/5353:53",
			"To a container or virtual machine of this machine",
			"kubevpn proxy deployment/web --port 8080=172.17.0.5:3000",
			"Receive a copy, while the pods still answer", "kubevpn proxy service/web -n shop --mirror",
			"Match headers of an application that serves TLS itself",
			"kubevpn proxy deployment/web --headers x-user=me --tls-secret web-tls",
			"Until Ctrl-C", "kubevpn proxy deployment/web --foreground",
			"For a script", "kubevpn proxy deployment/web -o json --yes",
		),
		Args:    checkWorkloads,
		PreRunE: o.checkSpec,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args
			return f.Report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.flags.CompleteWorkloads,
	}
	o.spec.addTo(cmd)
	o.spec.addRecord(cmd)
	command.CompleteWith(cmd, "container", o.flags.CompleteContainers)
	o.flags.AddTo(cmd, f, config.KeyMode, config.KeyRequireMatch)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false,
		"run until Ctrl-C, then end the intercept, and disconnect if this command connected")
	o.addSocks(cmd)
	o.output.AddTo(cmd)
	o.flags.PickWorkload(cmd)
	return cmd
}

// checkSpec returns an error for flags that are wrong in every cluster.
func (o *proxyOptions) checkSpec(*cobra.Command, []string) error {
	_, err := o.spec.spec("")
	return err
}

// addSocks adds --socks.
func (o *proxyOptions) addSocks(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.socks, "socks", "",
		"run until Ctrl-C without root and without changing this machine, and serve a SOCKS5 and HTTP proxy to the "+
			"cluster at this loopback address and port; port 0 takes a free one")
}

func (o *proxyOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	req, err := o.request(ctx, on, true)
	if err != nil {
		return err
	}
	return o.ask(ctx, req, on, quiet)
}

// ask sends the request to the daemon and prints the result.
func (o *proxyOptions) ask(ctx context.Context, req api.InterceptRequest, on func(api.Event), quiet func()) error {
	begun := false
	var all []api.Intercept
	var printing error
	show := func(e api.Event) {
		on(e)
		if e.Intercept == nil || e.Done {
			return
		}
		quiet()
		if o.output.ForPeople() {
			printIntercept(o.f.Out, e.Intercept)
		}
		if all = append(all, *e.Intercept); len(all) == len(req.Workloads) {
			printing = printIntercepts(o.f.Out, o.output, all)
		}
		if o.foreground && !begun && o.output.ForPeople() && o.f.Events == 0 {
			fmt.Fprintln(o.f.Errout, "Ctrl-C ends the intercept.")
		}
		begun = true
	}
	err := o.intercept(ctx, req, show, quiet)
	if o.foreground && begun && errors.Is(err, context.Canceled) && ctx.Err() != nil {
		err = nil // Ctrl-C is the regular end
	}
	return cmp.Or(err, printing)
}

// printIntercepts prints the result of proxy in a format for programs: one object, or the list of several.
func printIntercepts(w io.Writer, f *term.Format, all []api.Intercept) error {
	names := api.Texts(all, func(i api.Intercept) string { return i.Workload })
	if len(all) == 1 {
		all[0].TypeMeta = api.Type(api.KindIntercept)
		return f.PrintResult(w, all[0], names...)
	}
	return f.PrintResult(w, api.InterceptList{TypeMeta: api.Type(api.KindInterceptList), Items: all}, names...)
}

// request builds the request. It checks the flags here, because the daemon would reject them only after it has
// connected. intercepts is false if the workload keeps all its requests.
func (o *proxyOptions) request(ctx context.Context, on func(api.Event),
	intercepts bool) (api.InterceptRequest, error) {
	if o.socks != "" {
		o.foreground, o.flags.Here, o.flags.Own = true, true, true
	}
	connect, err := o.flags.Request(ctx, on)
	if err != nil {
		return api.InterceptRequest{}, err
	}
	spec, err := o.spec.spec(o.flags.Config.Mode)
	if err != nil {
		return api.InterceptRequest{}, err
	}
	if intercepts {
		if err := checkMatch(&o.flags.Config, spec, connect.Namespace); err != nil {
			return api.InterceptRequest{}, err
		}
	}
	if len(o.spec.portmap) > 0 {
		on(api.Event{Warning: "--portmap is deprecated: use --port, which has the order of kubectl, LOCAL:CONTAINER"})
	}
	if o.spec.tlsSecret != "" {
		if spec.TLS, err = intercept.TLSTermination(ctx, o.flags.Cluster, connect.Namespace,
			o.spec.tlsSecret); err != nil {
			return api.InterceptRequest{}, err
		}
	}
	connect.Use = true
	return api.InterceptRequest{Connect: connect, Workloads: o.workloads, Spec: spec, Attached: o.foreground}, nil
}

// printIntercept prints the result of proxy as text.
func printIntercept(w io.Writer, i *api.Intercept) {
	verb := "come to this machine"
	if i.Mirror {
		verb = "are copied to this machine"
	}
	if i.Clone != nil {
		printClone(w, i)
		if i.Clone.NoTraffic {
			return
		}
	} else {
		fmt.Fprintf(w, "%s, namespace %s: requests %s (%s)\n", i.Workload, i.Namespace, verb, i.ID)
	}
	fmt.Fprintf(w, "  match     %s\n", i.Match)
	if i.Exposed != "" {
		fmt.Fprintf(w, "  name      %s\n", i.Exposed)
	}
	for _, p := range i.Ports {
		if i.Clone != nil {
			fmt.Fprintf(w, "  port      %s\n", portName(p))
			continue
		}
		fmt.Fprintf(w, "  port      %s → %s\n", portName(p), p.Place())
	}
	fmt.Fprintf(w, "  pods      %s\n", term.Pods(i))
	for _, pod := range i.Pods {
		if !pod.Intercepted {
			fmt.Fprintf(w, "  not yet   %s: %s\n", pod.Name, cmp.Or(pod.Reason, "none"))
		}
	}
	if i.Mode != "" {
		fmt.Fprintf(w, "  agent     %s\n", strings.TrimSuffix(i.Mode+": "+i.ModeReason, ": "))
	}
	term.PrintEach(w, "checked", api.Texts(i.Checks, term.CheckText)...)
	for _, other := range i.Others {
		term.PrintEach(w, "beside", other.Owner+": "+term.Matched(other.Match, other.Mirror))
	}
	term.PrintEach(w, "warning", i.Warnings...)
}

// portName returns "8080", "udp/53" or "8080 (http)".
func portName(p api.PortMap) string {
	s := term.Port(p.Protocol, p.Container)
	if p.Name != "" {
		s += " (" + p.Name + ")"
	}
	return s
}

// intercept has the daemon hold the intercepts of the request, with the consent of the user.
func (o *proxyOptions) intercept(ctx context.Context, req api.InterceptRequest, on func(api.Event),
	quiet func()) error {
	if o.socks != "" {
		l, err := command.ListenProxy(o.socks)
		if err != nil {
			return err
		}
		defer l.Close()
		return o.flags.Hold(ctx, req, nil, l, o.output, on, quiet)
	}
	return o.flags.Consenting(&req.Connect, o.output, quiet).Run(ctx, on, func(on func(api.Event)) error {
		return o.f.Daemon().Intercept(ctx, req, on, quiet)
	})
}
