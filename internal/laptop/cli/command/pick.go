package command

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/laptop/cli/term"
)

// A Lister lists arguments of a command, each with an optional description behind it. what describes them in the
// plural: "workloads in the namespace shop". on receives the progress.
type Lister func(ctx context.Context, on func(api.Event)) (what string, options []string, err error)

// Pickable lets the user pick the first argument of cmd in a terminal, if the command line has none and the output is
// for people. example is a valid argument: Pickable checks the other arguments with it before it lists any.
func Pickable(cmd *cobra.Command, f *Factory, example string, list Lister) {
	check, run := cmd.Args, cmd.RunE
	argument := strings.Trim(strings.Fields(cmd.Use)[1], ".") // as the help names it
	cmd.Long += "\n\nIn a terminal, without " + argument + ", the command lists what you can pick."
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		output := cmd.Flag("output")
		forProgram := output != nil && output.Changed && !output.Value.(*term.Format).ForPeople()
		if cmd.ArgsLenAtDash() != 0 && len(args) != 0 || forProgram || !f.CanPick() {
			return check(cmd, args)
		}
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			picked, err := f.pick(cmd.Context(), list)
			if err == nil {
				args = withFirst(cmd, picked, args)
				err = check(cmd, args)
			}
			if err != nil {
				return err
			}
			words := slices.Clone(f.Args)
			words[slices.Index(words, cmd.CalledAs())] = picked // no flag before the command has such a value
			f.Note("running `%s %s`", cmd.CommandPath(), strings.Join(api.Texts(words, api.ShellQuote), " "))
			return run(cmd, args)
		}
		return check(cmd, withFirst(cmd, example, args))
	}
}

// withFirst makes first the argument of cmd before --, and returns all arguments. others follow --, if there is one.
func withFirst(cmd *cobra.Command, first string, others []string) []string {
	words := append([]string{first, "--"}, others...)
	if cmd.ArgsLenAtDash() < 0 {
		words = words[:1]
	}
	_ = cmd.Flags().Parse(words) // there are no flags in it
	return cmd.Flags().Args()
}

// pick shows the progress of list, and lets the user pick.
func (f *Factory) pick(ctx context.Context, list Lister) (picked string, err error) {
	err = f.Report(ctx, nil, func(ctx context.Context, on func(api.Event), quiet func()) error {
		what, options, err := list(ctx, on)
		if err == nil && len(options) == 0 {
			err = api.Errorf(api.ExitWorkload, "there are no %s", what).WithHint("name another one in the command")
		}
		if err == nil {
			quiet()
			picked, err = f.Pick(ctx, "Pick one of the "+what, options)
		}
		return err
	})
	return picked, err
}

// PickWorkload lets the user pick the workload of cmd: see Pickable.
func (k *ClusterFlags) PickWorkload(cmd *cobra.Command) {
	Pickable(cmd, k.f, "deployment/web", func(ctx context.Context, on func(api.Event)) (string, []string, error) {
		s, err := k.Login(ctx, on)
		if err != nil {
			return "", nil, err
		}
		on(api.Event{Step: "Listing the workloads"})
		list, err := workloads.New(s.Cluster).List(ctx, s.Prepared.Namespace, labels.Everything())
		for _, warning := range list.Warnings {
			on(api.Event{Warning: warning})
		}
		names := api.Texts(list.Items, func(w api.Workload) string { return w.Workload })
		return "workloads in the namespace " + s.Prepared.Namespace, names, err
	})
}
