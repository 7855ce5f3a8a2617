package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

type cloneOptions struct {
	proxyOptions
	clone   api.CloneSpec
	sync    []string
	volumes []string
}

func newClone(a *app) *cobra.Command {
	o := &cloneOptions{proxyOptions: proxyOptions{app: a, output: newFormat("text", "json")}}
	cmd := &cobra.Command{
		Use:   "clone TYPE/NAME [-- COMMAND...]",
		Short: "Run a copy of a workload in the cluster, for your requests alone",
		Long: "Clone runs a copy of a workload beside it, with another image, environment or command, and sends requests for\n" +
			"the workload's pods to it: those that match, or all of them. Others go on to the workload as before. It is\n" +
			"yours until `kubevpn leave`, and goes by itself two minutes after this machine does. It connects first if it\n" +
			"must. With --sync, files of this machine go to its container as you save them.",
		Example: examples(
			"Another image for your requests", "kubevpn clone deployment/web --target-image web:pr-7 --headers x-user=me",
			"Edit here, run there", "kubevpn clone deployment/web --headers x-user=me --sync .:/app --restart-on-sync",
			"With another environment and command", "kubevpn clone deployment/web --env LOG=debug --headers x-user=me -- node --inspect server.js",
			"Just a copy, which nothing goes to: http://db-try", "kubevpn clone statefulset/db --no-traffic --name db-try",
			"What a CronJob runs, at once", "kubevpn clone cronjob/report --target-image report:pr-7",
			"End it", "kubevpn leave deployment/web",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			names := args
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				names = args[:n]
			}
			if len(names) > 1 {
				return api.Errorf(api.ExitUsage, "`kubevpn clone` takes one workload").WithHint("a command for the clone goes behind --")
			}
			return checkWorkloads(cmd, names)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args[:1]
			if words := args[1:]; len(words) > 0 {
				if len(o.clone.Command) > 0 {
					return api.Errorf(api.ExitUsage, "the clone's command is given twice: with --command, and behind --")
				}
				o.clone.Command = words
			}
			return a.report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.flags.kube.completeWorkloads(a),
	}
	o.spec.addMatch(cmd)
	cmd.Flags().StringVarP(&o.spec.container, "container", "c", "", "container that the flags are about (default the one that kubectl would take)")
	completeWith(cmd, "container", o.flags.kube.completeContainers(a))
	o.flags.addTo(cmd, a, config.KeyMode)
	f := cmd.Flags()
	f.StringVar(&o.clone.Image, "target-image", "", "image of the clone's container (default the workload's)")
	f.StringArrayVar(&o.clone.Env, "env", nil, "NAME=VALUE in the clone's environment; may be repeated")
	f.StringArrayVar(&o.clone.Command, "command", nil, "command of the clone's container, a word each time; or behind --")
	f.StringVar(&o.clone.Name, "name", "", "name of the clone (default the workload's and yours)")
	f.Int32Var(&o.clone.Replicas, "replicas", 1, "pods of the clone")
	f.StringVar(&o.clone.Namespace, "target-namespace", "", "namespace of the clone (default the workload's)")
	f.StringArrayVar(&o.volumes, "volume", nil, "NAME=empty or NAME=share, for a volume that only one node can have; may be repeated (default empty)")
	f.BoolVar(&o.clone.NoTraffic, "no-traffic", false, "send nothing to the clone, which has a name of its own all the same")
	f.StringArrayVar(&o.sync, "sync", nil, "LOCAL:REMOTE, files of this machine that go to the clone's container as they change, that way only; may be repeated")
	f.BoolVar(&o.clone.Restart, "restart-on-sync", false, "start the container's command again when files came")
	f.BoolVar(&o.foreground, "foreground", false, "stay until Ctrl-C, then end what was begun: the clone, and the connection if there was none")
	completeWith(cmd, "target-namespace", o.flags.kube.completeNamespaces(a))
	o.output.addTo(cmd)
	return cmd
}

// request is that of proxy, with the clone.
func (o *cloneOptions) request(ctx context.Context, on func(api.Event)) (api.InterceptRequest, error) {
	spec, err := o.cloneSpec()
	if err != nil {
		return api.InterceptRequest{}, err
	}
	req, err := o.proxyOptions.request(ctx, on)
	if err != nil {
		return req, err
	}
	req.Spec.Clone = &spec
	return req, nil
}

func (o *cloneOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	req, err := o.request(ctx, on)
	if err != nil {
		return err
	}
	return o.ask(ctx, req, on, quiet)
}

// cloneSpec reads the flags that are about the clone.
func (o *cloneOptions) cloneSpec() (api.CloneSpec, error) {
	s := o.clone
	s.Container = o.spec.container
	if s.Replicas < 1 {
		return s, api.Errorf(api.ExitUsage, "--replicas is at least 1")
	}
	if s.NoTraffic && (len(o.spec.headers) > 0 || o.spec.path != "" || len(o.spec.methods) > 0) {
		return s, api.Errorf(api.ExitUsage, "--no-traffic and --headers, --path or --method do not go together")
	}
	if s.Restart && len(o.sync) == 0 {
		return s, api.Errorf(api.ExitUsage, "--restart-on-sync is without effect where nothing is synced").WithHint("--sync LOCAL:REMOTE")
	}
	for _, text := range o.sync {
		pair, err := parseSync(text)
		if err != nil {
			return s, err
		}
		s.Sync = append(s.Sync, pair)
	}
	for _, text := range o.volumes {
		name, how, _ := strings.Cut(text, "=")
		if name == "" || how != api.VolumeEmpty && how != api.VolumeShare {
			return s, api.Errorf(api.ExitUsage, "--volume: %q is neither NAME=empty nor NAME=share", text)
		}
		if s.Volumes == nil {
			s.Volumes = map[string]string{}
		}
		s.Volumes[name] = how
	}
	return s, nil
}

// parseSync reads LOCAL:REMOTE, whose LOCAL may have a colon on Windows. What is not there yet is no error of the clone's: it is
// one of whoever wrote it.
func parseSync(text string) (api.SyncPair, error) {
	n := strings.LastIndexByte(text, ':')
	if n <= 0 || !path.IsAbs(text[n+1:]) {
		return api.SyncPair{}, api.Errorf(api.ExitUsage, "--sync: %q is not LOCAL:REMOTE", text).
			WithHint("REMOTE is a path of the container: --sync .:/app")
	}
	local, err := filepath.Abs(text[:n])
	if err == nil {
		_, err = os.Stat(local)
	}
	if err != nil {
		return api.SyncPair{}, api.Errorf(api.ExitUsage, "--sync: %w", err)
	}
	return api.SyncPair{Local: local, Remote: path.Clean(text[n+1:])}, nil
}

// printClone is what proxy's result says of a clone.
func printClone(w io.Writer, i *api.Intercept) {
	c := i.Clone
	what := "requests go to the clone " + c.Name
	if c.NoTraffic {
		what = "the clone " + c.Name + " is there, and no requests go to it"
	}
	fmt.Fprintf(w, "%s, namespace %s: %s (%s)\n", i.Workload, i.Namespace, what, i.ID)
	for _, p := range c.Pods {
		fmt.Fprintf(w, "  clone     %s: %s\n", strings.TrimSpace(p.Name+" "+p.IP), podState(p))
	}
	if c.State == api.CloneDone {
		fmt.Fprintf(w, "  clone     %s has come to its end\n", c.Name)
	}
	if c.Host != "" {
		fmt.Fprintf(w, "  name      %s\n", hostName(c))
	}
	for _, s := range c.Sync {
		fmt.Fprintf(w, "  sync      %s\n", syncState(s))
	}
	for _, note := range c.Notes {
		fmt.Fprintf(w, "  note      %s\n", note)
	}
}

// podState is "ready", or why it is not.
func podState(p api.ClonePod) string {
	switch {
	case p.Ready:
		return "ready"
	case p.Reason != "":
		return "not ready: " + p.Reason
	}
	return "not ready"
}

// hostName is the clone's name with its ports: "web-ann.shop: 80 → 8080, 8080".
func hostName(c *api.Clone) string {
	var ports []string
	for _, p := range c.Ports {
		text := portNumber(p.Protocol, p.Port)
		if p.Target != p.Port {
			text += fmt.Sprintf(" → %d", p.Target)
		}
		ports = append(ports, text)
	}
	if len(ports) == 0 {
		return c.Host
	}
	return c.Host + ": " + strings.Join(ports, ", ")
}

// syncState is "/home/ann/web → /app: 37 in sync", or what is in the way.
func syncState(s api.Synced) string {
	state := "is being copied"
	switch {
	case s.LastError != "":
		state = s.LastError
	case s.Synced:
		state = fmt.Sprintf("%d in sync", s.Files)
	}
	return fmt.Sprintf("%s → %s: %s", s.Local, s.Remote, state)
}
