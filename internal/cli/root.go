package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
)

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "kubevpn",
		Short: "Your laptop on the cluster's network",
		Long: "kubevpn puts this machine on a Kubernetes cluster's network: pods, Services and cluster DNS are\n" +
			"reachable from every program, over nothing but the API server.",
		Example: examples(
			"Connect to the current context's cluster, use it, and disconnect", "kubevpn connect", "curl http://web.default", "kubevpn disconnect --all",
			"Have a workload's requests come to a program on this machine", "kubevpn proxy deployment/web --headers x-user=me", "kubevpn leave deployment/web",
			"See what is connected, and what comes here", "kubevpn status",
		),
		Args:              cobra.ArbitraryArgs, // an unknown command is told by RunE
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			return cmd.Help()
		},
	}
	root.SuggestionsMinimumDistance = 2
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(newHelp(a))
	root.AddGroup(
		&cobra.Group{ID: groupConnection, Title: "Connections:"},
		&cobra.Group{ID: groupIntercept, Title: "Workloads:"},
		&cobra.Group{ID: groupCluster, Title: "The cluster's part:"},
		&cobra.Group{ID: groupOther, Title: "Other:"},
	)
	root.SetHelpCommandGroupID(groupOther)
	add := func(group string, cmds ...*cobra.Command) {
		for _, cmd := range cmds {
			cmd.GroupID = group
			root.AddCommand(cmd)
		}
	}
	add(groupConnection, newConnect(a), newDisconnect(a), newStatus(a), newLogs(a), newQuit(a))
	add(groupIntercept, newProxy(a), newClone(a), newDev(a), newLeave(a), newReset(a))
	add(groupCluster, newInstall(a), newUninstall(a))
	add(groupOther, newVersion(a), newCompletion(a))
	root.AddCommand(newDaemon(a), newHelper(a), newSandbox(), newContainer(), newExecCredential(a))
	return root
}

const (
	groupConnection = "connection"
	groupIntercept  = "intercept"
	groupCluster    = "cluster"
	groupOther      = "other"
)

// examples lays out an Example: lines that begin with a capital are comments on the commands below them.
func examples(lines ...string) string {
	var b strings.Builder
	for i, line := range lines {
		if c := line[0]; c >= 'A' && c <= 'Z' {
			if i > 0 {
				b.WriteString("\n")
			}
			line = "# " + line
		}
		b.WriteString("  " + line + "\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

func newHelp(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Explain a command",
		Example: examples("Explain connect and its flags", "kubevpn help connect"),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return unknownCommand(cmd.Root(), args[0])
			}
			target.InitDefaultHelpFlag()
			return target.Help()
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			var names []cobra.Completion
			for _, sub := range cmd.Root().Commands() {
				if len(args) == 0 && sub.IsAvailableCommand() {
					names = append(names, cobra.CompletionWithDesc(sub.Name(), sub.Short))
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

func unknownCommand(root *cobra.Command, name string) error {
	err := api.Errorf(api.ExitUsage, "kubevpn has no command %q", name)
	if near := root.SuggestionsFor(name); len(near) > 0 {
		return err.WithHint("did you mean `kubevpn %s`?", strings.Join(near, "` or `kubevpn "))
	}
	return err.WithHint("`kubevpn --help` lists them")
}

// flagError tells which flag was meant, where one is near.
func flagError(cmd *cobra.Command, err error) error {
	e := api.Errorf(api.ExitUsage, "%w", err)
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "" {
		if near := nearestFlag(cmd.Flags(), unknown.GetSpecifiedName()); near != "" {
			return e.WithHint("did you mean --%s?", near)
		}
	}
	return e.WithHint("`%s --help` lists the flags", cmd.CommandPath())
}

// nearestFlag is the visible flag that name most likely stands for, or "".
func nearestFlag(flags *pflag.FlagSet, name string) string {
	best, bestDistance := "", len(name)/3+2
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		d := distance(name, f.Name)
		if strings.HasPrefix(f.Name, name) || strings.HasPrefix(name, f.Name) {
			d = min(d, 1)
		}
		if d < bestDistance {
			best, bestDistance = f.Name, d
		}
	})
	return best
}

// distance is Levenshtein's: how many letters to insert, remove or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// noArgs refuses arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return api.Errorf(api.ExitUsage, "`%s` takes no argument, and got %q", cmd.CommandPath(), args[0]).
			WithHint("`%s --help` shows how to use it", cmd.CommandPath())
	}
	return nil
}

// format is the value of -o.
type format struct {
	value   string
	allowed []string // the first is the default, and is not a machine's
}

func newFormat(allowed ...string) *format { return &format{value: allowed[0], allowed: allowed} }

func (f *format) String() string { return f.value }
func (f *format) Type() string   { return "format" }

func (f *format) Set(s string) error {
	if !slices.Contains(f.allowed, s) {
		return fmt.Errorf("there are %s", strings.Join(f.allowed, ", "))
	}
	f.value = s
	return nil
}

// addTo defines -o. Completing it is a matter of the list.
func (f *format) addTo(cmd *cobra.Command) {
	cmd.Flags().VarP(f, "output", "o", "output format: "+strings.Join(f.allowed, ", "))
	complete(cmd, "output", f.allowed...)
}

// complete makes a flag's values known to the shell.
func complete(cmd *cobra.Command, flag string, values ...string) {
	completeWith(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

func completeWith(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // the flag is defined a line above, or not at all
	}
}
