package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
)

type proxyOptions struct {
	app        *app
	workloads  []string
	flags      connectFlags
	spec       specFlags
	foreground bool
	output     *format
}

func newProxy(a *app) *cobra.Command {
	o := &proxyOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "proxy TYPE/NAME...",
		Short: "Bring a workload's requests to this machine",
		Long: "Proxy sends requests for a workload's pods to a program on this machine, at the same port, until\n" +
			"`kubevpn leave`. Others go on to the pods as before, and all do as soon as this machine is gone. It connects\n" +
			"first if it must. TYPE is anything that has pods, by kubectl's names: deployment, statefulset, daemonset,\n" +
			"replicaset, pod, service, or a custom resource with a pod template or a scale.",
		Example: examples(
			"All requests for a Deployment come to the same ports of this machine", "kubevpn proxy deployment/web",
			"Only yours, so that others can work on it too", "kubevpn proxy deployment/web --headers x-user=me",
			"By a regular expression, a path and a method", "kubevpn proxy deploy/web --headers 'x-user=~me|you' --path /api --method GET,POST",
			"To another port than the container's, TCP and UDP", "kubevpn proxy sts/dns --portmap 8080:3000 --portmap udp/53:5353",
			"Watch a copy, while the pods go on answering", "kubevpn proxy service/web -n shop --mirror",
			"Headers of an application that ends TLS itself", "kubevpn proxy deployment/web --headers x-user=me --tls-secret web-tls",
			"Until Ctrl-C", "kubevpn proxy deployment/web --foreground",
			"For a script", "kubevpn proxy deployment/web -o json",
		),
		Args: checkWorkloads,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args
			return a.report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.flags.kube.completeWorkloads(a),
	}
	o.spec.addTo(cmd)
	completeWith(cmd, "container", o.flags.kube.completeContainers(a))
	o.flags.addTo(cmd, a, config.KeyMode)
	cmd.Flags().BoolVar(&o.foreground, "foreground", false, "stay until Ctrl-C, then end what was begun: the intercept, and the connection if there was none")
	o.output.addTo(cmd)
	return cmd
}

func (o *proxyOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	req, err := o.request(ctx, on)
	if err != nil {
		return err
	}
	return o.ask(ctx, req, on, quiet)
}

// ask has the daemon do it.
func (o *proxyOptions) ask(ctx context.Context, req api.InterceptRequest, on func(api.Event), quiet func()) error {
	begun := false
	_, err := o.app.ask(ctx, question{path: api.PathIntercept, body: req, held: true, quiet: quiet, on: func(e api.Event) {
		on(e)
		if e.Intercept == nil || e.Done {
			return
		}
		quiet()
		if o.output.value == "text" {
			printIntercept(o.app.out, e.Intercept)
		}
		if o.foreground && !begun && o.output.value == "text" {
			fmt.Fprintln(o.app.errout, "Ctrl-C leaves.")
		}
		begun = true
	}})
	if o.foreground && begun && errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return nil // that is how it ends
	}
	return err
}

// request is what the user asks for. What the daemon would refuse after a while is refused here.
func (o *proxyOptions) request(ctx context.Context, on func(api.Event)) (api.InterceptRequest, error) {
	connect, cfg, err := o.flags.request(o.app)
	if err != nil {
		return api.InterceptRequest{}, err
	}
	spec, err := o.spec.spec(cfg.Mode)
	if err != nil {
		return api.InterceptRequest{}, err
	}
	c, err := cluster.Load(connect.Kubeconfig, cluster.Options{})
	if err != nil {
		return api.InterceptRequest{}, err
	}
	o.warnOfIgnored(ctx, c.ID(), on)
	if o.spec.tlsSecret != "" {
		if spec.TLS, err = termination(ctx, c, connect.Namespace, o.spec.tlsSecret); err != nil {
			return api.InterceptRequest{}, err
		}
	}
	connect.Use = true
	return api.InterceptRequest{Connect: connect, Workloads: o.workloads, Spec: spec, Attached: o.foreground}, nil
}

// warnOfIgnored tells of flags that say how to connect, where that was done already.
func (o *proxyOptions) warnOfIgnored(ctx context.Context, cluster string, on func(api.Event)) {
	var given []string
	for _, key := range []config.Key{config.KeyManagerNamespace, config.KeyNetstack, config.KeyTransport, config.KeyScheduler,
		config.KeyExtraCIDRs, config.KeyExcludeCIDRs} {
		if o.flags.settings.cmd.Flags().Changed(key.FlagName()) {
			given = append(given, "--"+key.FlagName())
		}
	}
	if len(given) == 0 {
		return
	}
	paths, err := o.app.paths()
	if err != nil {
		return // it is told where it matters
	}
	status, err := newClient(paths).status(ctx)
	if err != nil {
		return // there is no daemon, or it is about to say the same to the request itself
	}
	for _, connection := range status.Connections {
		if connection.ID == cluster && connection.Status != api.StatusFailed {
			on(api.Event{Warning: "this cluster is connected already, so that " + strings.Join(given, ", ") +
				" is without effect: `kubevpn disconnect " + cluster + "` first to change that"})
		}
	}
}

// printIntercept is the result of proxy for people.
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
	for _, p := range i.Ports {
		if i.Clone != nil {
			fmt.Fprintf(w, "  port      %s\n", portName(p))
			continue
		}
		fmt.Fprintf(w, "  port      %s → localhost:%d\n", portName(p), p.Local)
	}
	fmt.Fprintf(w, "  pods      %s\n", pods(i))
	for _, pod := range i.Pods {
		if !pod.Covered {
			fmt.Fprintf(w, "  not yet   %s: %s\n", pod.Name, orNone(pod.Reason))
		}
	}
	if i.Mode != "" {
		fmt.Fprintf(w, "  agent     %s\n", strings.TrimSuffix(i.Mode+": "+i.ModeReason, ": "))
	}
	for _, check := range i.Checks {
		fmt.Fprintf(w, "  checked   %s %s: %s\n", check.What, check.Target, check.Seen)
	}
	for _, other := range i.Others {
		fmt.Fprintf(w, "  beside    %s: %s\n", other.Owner, claimed(other.Match, other.Mirror))
	}
	for _, warning := range i.Warnings {
		fmt.Fprintf(w, "  warning   %s\n", warning)
	}
}

// portName is "8080", "udp/53" or "8080 (http)".
func portName(p api.PortMap) string {
	s := portNumber(p.Protocol, p.Container)
	if p.Name != "" {
		s += " (" + p.Name + ")"
	}
	return s
}

// pods is how many are covered: "2/3".
func pods(i *api.Intercept) string {
	covered := 0
	for _, p := range i.Pods {
		if p.Covered {
			covered++
		}
	}
	return fmt.Sprintf("%d/%d", covered, len(i.Pods))
}

// claimed is which requests are meant: "x-user=me, copied".
func claimed(match string, mirror bool) string {
	if mirror {
		return match + ", copied"
	}
	return match
}
