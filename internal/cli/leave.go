package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

type leaveOptions struct {
	app    *app
	req    api.LeaveRequest
	output *format
}

func newLeave(a *app) *cobra.Command {
	o := &leaveOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "leave TYPE/NAME...",
		Short: "End intercepts and clones: requests go to the workload again",
		Long: "Leave ends what `kubevpn proxy` and `kubevpn clone` began on this machine: requests go to the workload again, and\n" +
			"then its clone is deleted. The connection stays. What others have of the workload is left alone: see\n" +
			"`kubevpn reset`. What is still there because this machine went down, an agent in a workload's template or a\n" +
			"clone, is removed as well, where the workload is named.",
		Example: examples(
			"End one", "kubevpn leave deployment/web",
			"One of two that have the same name, by its namespace or its ID in `kubevpn status -o wide`", "kubevpn leave deployment/web -n shop", "kubevpn leave 3f2a91c04b7e",
			"End all", "kubevpn leave --all",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.req.All && len(args) > 0:
				return api.Errorf(api.ExitUsage, "--all and a workload do not go together")
			case o.req.All || len(args) > 0 && !slices.ContainsFunc(args, func(arg string) bool { return !isID(arg) }):
				return nil
			case len(args) == 0:
				return api.Errorf(api.ExitUsage, "`kubevpn leave` needs the name of a workload, or --all").
					WithHint("`kubevpn status` shows what is intercepted")
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
	cmd.Flags().StringVarP(&o.req.Namespace, "namespace", "n", "", "namespace of the workload (default whichever it is)")
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
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	left := 0
	_, err = newClient(paths).stream(ctx, api.PathLeave, o.req, func(string) {}, func(e api.Event) {
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
		return api.Errorf(api.ExitWorkload, "%s is not intercepted from here: nothing is", o.req.Workloads[0]).
			WithHint("`kubevpn reset` removes what others have")
	case errors.Is(err, errNoDaemon):
		err = nil
	}
	quiet()
	if err == nil && left == 0 && o.output.value == "text" {
		fmt.Fprintln(o.app.errout, "nothing is intercepted")
	}
	return err
}

// leaveLeft removes what a daemon of this user that was killed left in the workloads' templates: no daemon knows of it.
func (o *leaveOptions) leaveLeft(ctx context.Context, on func(api.Event)) error {
	kube := kubeFlags{in: cluster.Inputs{Namespace: o.req.Namespace}}
	prepared, err := kube.prepare(o.app)
	if err != nil {
		return err
	}
	return o.app.Reset(ctx, api.ResetRequest{
		Kubeconfig: prepared.Kubeconfig, Namespace: prepared.Namespace, Workloads: o.req.Workloads, Mine: true,
	}, on)
}
