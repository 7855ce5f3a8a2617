package workload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
)

type leaveOptions struct {
	f      *command.Factory
	req    api.LeaveRequest
	kube   command.ClusterFlags
	output *term.Format
}

func newLeave(f *command.Factory) *cobra.Command {
	o := &leaveOptions{f: f, output: term.NewFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "leave TYPE/NAME...",
		Short: "End intercepts and clones: requests go to the workload again",
		Long: "End intercepts and clones that `kubevpn proxy` and `kubevpn clone` created from this machine.\n" +
			"First requests go to the workload again, and then the clone is deleted. The connection stays. The\n" +
			"command does not change the intercepts of other users: see `kubevpn reset`. If you name a\n" +
			"workload, it also removes leftovers of a crash of this machine: an agent in the workload's\n" +
			"template, or a clone.",
		Example: command.Examples(
			"End one", "kubevpn leave deployment/web",
			"End one of two with the same name, by its namespace or its ID in `kubevpn status -o wide`",
			"kubevpn leave deployment/web -n shop", "kubevpn leave 3f2a91c04b7e",
			"End one in another cluster", "kubevpn leave deployment/web --context staging",
			"End all", "kubevpn leave --all",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.req.All && len(args) > 0:
				return api.Errorf(api.ExitUsage, "--all cannot be combined with a workload")
			case o.req.All || len(args) > 0 && !slices.ContainsFunc(args, func(arg string) bool { return !isID(arg) }):
				return nil
			case len(args) == 0:
				return api.Errorf(api.ExitUsage, "`kubevpn leave` requires the name of a workload, or --all").
					WithHint("`kubevpn status` lists the intercepts")
			}
			return checkWorkloads(cmd, slices.DeleteFunc(slices.Clone(args), isID))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.req.Workloads = args
			return f.Report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: f.CompleteFromStatus(interceptNames),
	}
	cmd.Flags().BoolVar(&o.req.All, "all", false, "end all intercepts and clones of this machine")
	o.kube.AddClusterTo(cmd, f)
	cmd.Flags().StringVarP(&o.req.Namespace, "namespace", "n", "", "namespace of the workload (default: any)")
	command.CompleteWith(cmd, "namespace", f.CompleteFromStatus(interceptNamespaces))
	o.output.AddTo(cmd)
	return cmd
}

// isID reports whether s may be the ID of an intercept.
func isID(s string) bool { return len(s) == 12 && strings.Trim(s, "0123456789abcdef") == "" }

// run has the daemon end the intercepts. If no daemon knows a named workload, one that was killed may have left an
// agent or a clone of it. The CLI removes these itself, not the daemon: only the CLI reads the kubeconfig and logs in,
// and leave starts no daemon.
func (o *leaveOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	var err error
	if o.req.Connection, err = o.kube.ConnectionID(ctx); err != nil {
		return err
	}
	ended := 0
	err = o.f.Daemon().Leave(ctx, o.req, func(e api.Event) {
		on(e)
		if e.Done {
			ended++
		}
	})
	e, ok := errors.AsType[*api.Error](err)
	unknown := errors.Is(err, daemonclient.ErrNoDaemon) || ok && e.Code == api.ExitWorkload
	if unknown && len(o.req.Workloads) > 0 && !slices.ContainsFunc(o.req.Workloads, isID) {
		removeErr := o.removeLeftovers(ctx, on)
		if e := api.AsError(removeErr); e == nil || e.Code != api.ExitWorkload && e.Code != api.ExitKubeconfig {
			return removeErr
		} // else there are no leftovers, or no kubeconfig: the first error counts
	}
	if errors.Is(err, daemonclient.ErrNoDaemon) && len(o.req.Workloads) > 0 {
		return api.Errorf(api.ExitWorkload, "%s is not intercepted from this machine", o.req.Workloads[0]).
			WithHint("`kubevpn reset` removes the intercepts of other users")
	}
	if err != nil && !errors.Is(err, daemonclient.ErrNoDaemon) {
		return err
	}
	quiet()
	if ended == 0 && o.output.ForPeople() {
		fmt.Fprintln(o.f.Errout, "nothing is intercepted")
	}
	return nil
}

// removeLeftovers removes the agents and clones that a killed daemon of this user left in the cluster.
func (o *leaveOptions) removeLeftovers(ctx context.Context, on func(api.Event)) error {
	o.kube.Inputs.Overrides.Context.Namespace = o.req.Namespace
	l, err := o.kube.Login(ctx, on)
	if err != nil {
		return err
	}
	return o.f.Reset(ctx, l.Cluster, api.ResetRequest{
		Namespace: l.Prepared.Namespace, Workloads: o.req.Workloads, Mine: true,
	}, on)
}
