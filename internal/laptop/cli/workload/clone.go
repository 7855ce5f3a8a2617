package workload

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
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type cloneOptions struct {
	proxyOptions
	clone   api.CloneSpec
	sync    []string
	volumes []string
}

func newClone(f *command.Factory) *cobra.Command {
	o := &cloneOptions{proxyOptions: proxyOptions{f: f, output: term.NewObjectFormat("text")}}
	cmd := &cobra.Command{
		Use:   "clone TYPE/NAME [-- COMMAND...]",
		Short: "Run a copy of a workload in the cluster for your requests",
		Long: "Run a copy of a workload in the cluster, with another image, environment or command. Requests for\n" +
			"the workload's pods go to the clone: all requests, or those that match. Other requests still go to\n" +
			"the workload. The clone runs until `kubevpn leave`. If this machine disappears, Kubernetes deletes\n" +
			"the clone after two minutes. The command connects first if necessary. With --sync, it copies files\n" +
			"of this machine to the clone's container whenever you save them.",
		Example: command.Examples(
			"Another image for your requests",
			"kubevpn clone deployment/web --target-image web:pr-7 --headers x-user=me",
			"Edit files here, run them in the cluster",
			"kubevpn clone deployment/web --headers x-user=me --sync .:/app --restart-on-sync",
			"With another environment and command",
			"kubevpn clone deployment/web --env LOG=debug --headers x-user=me -- node --inspect server.js",
			"A copy that receives no requests, reachable as http://db-try",
			"kubevpn clone statefulset/db --no-traffic --name db-try",
			"Run the pod of a CronJob now", "kubevpn clone cronjob/report --target-image report:pr-7",
			"End it", "kubevpn leave deployment/web",
		),
		Args: oneWorkload("write a command for the clone after --"),
		PreRunE: func(cmd *cobra.Command, args []string) error {
			if err := o.checkSpec(cmd, args); err != nil {
				return err
			}
			_, err := o.cloneSpec()
			return err
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args[:1]
			if words := args[1:]; len(words) > 0 {
				if len(o.clone.Command) > 0 {
					return api.Errorf(api.ExitUsage, "--command and a command after -- are mutually exclusive")
				}
				o.clone.Command = words
			}
			return f.Report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.flags.CompleteWorkloads,
	}
	o.addTo(cmd)
	o.flags.PickWorkload(cmd)
	return cmd
}

// addTo defines the flags.
func (o *cloneOptions) addTo(cmd *cobra.Command) {
	o.spec.addMatch(cmd)
	o.spec.addCache(cmd)
	o.spec.addRecord(cmd)
	cmd.Flags().StringSliceVar(&o.spec.ports, "port", nil, "port of the container whose requests go to the clone's "+
		"same port, [tcp|udp/]PORT; may be repeated (default: all ports)")
	cmd.Flags().StringVarP(&o.spec.container, "container", "c", "",
		"container that the flags change (default: as for 'kubevpn proxy')")
	command.CompleteWith(cmd, "container", o.flags.CompleteContainers)
	o.flags.AddTo(cmd, o.f, config.KeyMode, config.KeyRequireMatch)
	f := cmd.Flags()
	f.StringVar(&o.clone.Image, "target-image", "", "image of the clone's container (default: the workload's)")
	f.StringArrayVar(&o.clone.Env, "env", nil, "NAME=VALUE in the clone's environment; may be repeated")
	f.StringArrayVar(&o.clone.Command, "command", nil,
		"command of the clone's container, one word per flag; or write the command after --")
	f.StringVar(&o.clone.Name, "name", "", "name of the clone (default: the workload's and your user name)")
	f.Int32Var(&o.clone.Replicas, "replicas", 1, "number of pods of the clone")
	f.StringVar(&o.clone.Namespace, "target-namespace", "", "namespace of the clone (default: the workload's)")
	f.StringArrayVar(&o.volumes, "volume", nil,
		"NAME=empty: an empty directory, the default for a volume that only one node can mount; NAME=share: the "+
			"workload's volume; may be repeated")
	f.BoolVar(&o.clone.NoTraffic, "no-traffic", false, "send no requests to the clone; it still has a DNS name")
	f.StringArrayVar(&o.sync, "sync", nil,
		"LOCAL:REMOTE: copy files of this machine to the clone's container as they change, in this direction only; "+
			"may be repeated")
	f.BoolVar(&o.clone.SyncShared, "sync-shared", false,
		"let --sync change files on a volume that the workload or another pod writes to")
	f.StringArrayVar(&o.clone.InsecureRegistries, "insecure-registry", nil,
		"HOST[:PORT] of a registry that --sync may read image configurations from without TLS and credentials; may "+
			"be repeated")
	f.BoolVar(&o.clone.Restart, "restart-on-sync", false, "restart the container's command when files have changed")
	f.BoolVar(&o.foreground, "foreground", false,
		"run until Ctrl-C, then delete the clone, and disconnect if this command connected")
	o.addSocks(cmd)
	command.CompleteWith(cmd, "target-namespace", o.flags.CompleteNamespaces)
	o.output.AddTo(cmd)
}

// run sends the request of proxy, with a clone.
func (o *cloneOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	spec, err := o.cloneSpec()
	if err != nil {
		return err
	}
	req, err := o.request(ctx, on, !spec.NoTraffic)
	if err != nil {
		return err
	}
	for _, p := range req.Spec.Ports {
		if p.Local != p.Container || p.Host != "" {
			return api.Errorf(api.ExitUsage, "--port: a clone receives requests at the ports of the workload").
				WithHint("write one port, like --port 8080 or --port http; `kubevpn proxy` maps ports to this machine")
		}
	}
	req.Spec.Clone = &spec
	return o.ask(ctx, req, on, quiet)
}

// cloneSpec builds the specification of the clone from the flags.
func (o *cloneOptions) cloneSpec() (api.CloneSpec, error) {
	s := o.clone
	s.Container = o.spec.container
	if s.Replicas < 1 {
		return s, api.Errorf(api.ExitUsage, "--replicas must be at least 1")
	}
	if s.NoTraffic && o.spec.selects() {
		return s, api.Errorf(api.ExitUsage,
			"--no-traffic cannot be combined with --port, or with a match such as --headers")
	}
	if s.Restart && len(o.sync) == 0 {
		return s, api.Errorf(api.ExitUsage, "--restart-on-sync requires --sync").WithHint("add --sync LOCAL:REMOTE")
	}
	if s.SyncShared && len(o.sync) == 0 {
		return s, api.Errorf(api.ExitUsage, "--sync-shared requires --sync").WithHint("add --sync LOCAL:REMOTE")
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
			return s, api.Errorf(api.ExitUsage, "--volume: %q is neither NAME=empty nor NAME=share", text).
				WithHint("write it like --volume data=share")
		}
		if s.Volumes == nil {
			s.Volumes = map[string]string{}
		}
		s.Volumes[name] = how
	}
	return s, nil
}

// parseSync parses LOCAL:REMOTE. LOCAL may contain a colon on Windows, and must exist.
func parseSync(text string) (api.SyncPair, error) {
	n := strings.LastIndexByte(text, ':')
	if n <= 0 || !path.IsAbs(text[n+1:]) {
		return api.SyncPair{}, api.Errorf(api.ExitUsage, "--sync: %q is not LOCAL:REMOTE", text).
			WithHint("REMOTE is an absolute path in the container: --sync .:/app")
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

// printClone prints a clone as text.
func printClone(w io.Writer, i *api.Intercept) {
	c := i.Clone
	result := "requests go to the clone " + c.Name
	if c.NoTraffic {
		result = "the clone " + c.Name + " runs and receives no requests"
	}
	fmt.Fprintf(w, "%s, namespace %s: %s (%s)\n", i.Workload, i.Namespace, result, i.ID)
	for _, p := range c.Pods {
		fmt.Fprintf(w, "  clone     %s: %s\n", strings.TrimSpace(p.Name+" "+p.IP), term.ClonePod(p))
	}
	if c.State == api.CloneDone {
		fmt.Fprintf(w, "  clone     %s has completed\n", c.Name)
	}
	if c.Host != "" {
		fmt.Fprintf(w, "  name      %s\n", term.CloneHost(c))
	}
	term.PrintEach(w, "sync", api.Texts(c.Sync, term.Synced)...)
	term.PrintEach(w, "note", c.Notes...)
}
