package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
)

type leaveOptions struct {
	app    *app
	req    api.LeaveRequest
	kube   kubeFlags
	output *format
}

func newLeave(a *app) *cobra.Command {
	o := &leaveOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "leave TYPE/NAME...",
		Short: "End intercepts and clones: requests go to the workload again",
		Long: "Leave ends intercepts and clones that `kubevpn proxy` and `kubevpn clone` created from this machine:\n" +
			"requests go to the workload again, and then the clone is deleted. The connection stays. Leave does\n" +
			"not change the intercepts of other users: see `kubevpn reset`. If you name a workload, leave also\n" +
			"removes what a crash of this machine left in the cluster: an agent in the workload's template, or a\n" +
			"clone.",
		Example: examples(
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
				return api.Errorf(api.ExitUsage, "`kubevpn leave` needs the name of a workload, or --all").
					WithHint("`kubevpn status` lists the intercepts")
			}
			return checkWorkloads(cmd, slices.DeleteFunc(slices.Clone(args), isID))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.req.Workloads = args
			return a.report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: a.completeIntercepts,
	}
	cmd.Flags().BoolVar(&o.req.All, "all", false, "end all intercepts and clones of this machine")
	o.kube.addClusterTo(cmd)
	cmd.Flags().StringVarP(&o.req.Namespace, "namespace", "n", "", "namespace of the workload (default: any)")
	completeWith(cmd, "namespace", a.completeInterceptNamespaces)
	o.output.addTo(cmd)
	return cmd
}

// isID reports whether s may be an intercept's ID.
func isID(s string) bool { return len(s) == 12 && strings.Trim(s, "0123456789abcdef") == "" }

func (o *leaveOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	paths, err := o.app.paths()
	if err != nil {
		return err
	}
	if o.kube.in.Context != "" || o.kube.in.Kubeconfig != "" {
		c, _, err := o.kube.load(o.app)
		if err != nil {
			return err
		}
		o.req.Connection = c.ID()
	}
	bounded, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	left := 0
	_, err = newClient(paths).stream(bounded, api.PathLeave, o.req, func(string) {}, func(e api.Event) {
		on(e)
		if e.Done {
			left++
		}
	})
	var said *api.Error
	unknown := errors.Is(err, errNoDaemon) || errors.As(err, &said) && said.Code == api.ExitWorkload
	if unknown && len(o.req.Workloads) > 0 && !slices.ContainsFunc(o.req.Workloads, isID) {
		left := o.leaveLeft(ctx, on)
		if e := api.AsError(left); e == nil || e.Code != api.ExitWorkload && e.Code != api.ExitKubeconfig {
			return left
		}
	}
	switch {
	case errors.Is(err, errNoDaemon) && len(o.req.Workloads) > 0:
		return api.Errorf(api.ExitWorkload, "%s is not intercepted from this machine", o.req.Workloads[0]).
			WithHint("`kubevpn reset` removes the intercepts of other users")
	case errors.Is(err, errNoDaemon):
		err = nil
	}
	quiet()
	if err == nil && left == 0 && o.output.value == "text" {
		fmt.Fprintln(o.app.errout, "nothing is intercepted")
	}
	return err
}

// leaveLeft removes what a killed daemon of this user left in the cluster. No daemon knows about it.
func (o *leaveOptions) leaveLeft(ctx context.Context, on func(api.Event)) error {
	o.kube.in.Namespace = o.req.Namespace
	c, prepared, err := o.kube.login(ctx, o.app, on, "")
	if err != nil {
		return err
	}
	return o.app.Reset(ctx, c, api.ResetRequest{
		Namespace: prepared.Namespace, Workloads: o.req.Workloads, Mine: true,
	}, on)
}
