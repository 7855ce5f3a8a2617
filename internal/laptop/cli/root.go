package cli

import (
	"errors"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/admin"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/connect"
	"kubevpn/internal/laptop/cli/inspect"
	"kubevpn/internal/laptop/cli/workload"
)

func newRoot(f *command.Factory, plugin bool) *cobra.Command {
	showVersion := false
	root := &cobra.Command{
		Use:   "kubevpn",
		Short: "Connect this machine to the network of a Kubernetes cluster",
		Long: "kubevpn connects this machine to the network of a Kubernetes cluster. Every program reaches pods,\n" +
			"Services and cluster DNS names. kubevpn needs only the API server for this.",
		Example: command.Examples(
			"Connect to the cluster of the current context, call a Service, and disconnect",
			"kubevpn connect", "curl http://web.default", "kubevpn disconnect --all",
			"Send requests of a workload to a program on this machine",
			"kubevpn proxy deployment/web --headers x-user=me", "kubevpn leave deployment/web",
			"Show the connections and intercepts", "kubevpn status",
		),
		Args:              cobra.ArbitraryArgs, // RunE reports an unknown command
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			if showVersion {
				admin.PrintVersion(f.Out)
				return nil
			}
			return cmd.Help()
		},
		PersistentPreRun: func(*cobra.Command, []string) { setVerbosity(f) },
	}
	root.Flags().BoolVar(&showVersion, "version", false, "print the version of this program")
	command.AddGlobal(root, f)
	root.SetUsageFunc(printUsage)
	root.SuggestionsMinimumDistance = 2
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(newHelp())
	for _, group := range commandGroups() {
		root.AddGroup(&cobra.Group{ID: group.title, Title: group.title + ":"})
		for _, cmd := range group.commands(f) {
			cmd.GroupID = group.title
			root.AddCommand(cmd)
		}
		root.SetHelpCommandGroupID(group.title) // the last one
	}
	for _, cmd := range []*cobra.Command{newUp(f), newDown(f), newMCP(f)} { // here, because they run other commands
		cmd.GroupID = "Workloads"
		if cmd.Name() == "mcp" {
			cmd.GroupID = "Troubleshooting"
		}
		root.AddCommand(cmd)
	}
	root.AddCommand(admin.Hidden(f)...)
	complete(root)
	if plugin {
		asPlugin(root)
	}
	return root
}

// group is a group of commands in the help. Each has a package.
type group struct {
	title    string
	commands func(*command.Factory) []*cobra.Command
}

func commandGroups() []group {
	return []group{
		{"Connections", connect.Commands}, {"Workloads", workload.Commands}, {"Troubleshooting", inspect.Commands},
		{"Administration", admin.Commands},
	}
}

// complete makes the commands below cmd reject arguments, and show their help, unless they do something else.
func complete(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		if sub.Args == nil {
			sub.Args = noArgs
		}
		if sub.RunE == nil {
			sub.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
		complete(sub)
	}
}

// noArgs rejects arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return api.Errorf(api.ExitUsage, "`%s` accepts no arguments, but got %q", cmd.CommandPath(), args[0]).
			WithHint("see `%s --help` for usage", cmd.CommandPath())
	}
	return nil
}

// pluginName is the command as which kubectl runs this program, if its file is named kubectl-kubevpn.
const pluginName = "kubectl kubevpn"

// asPlugin makes the help of all commands name the program as a plugin of kubectl.
func asPlugin(cmd *cobra.Command) {
	if !cmd.HasParent() {
		cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: pluginName}
	}
	cmd.Long, cmd.Example = inPlugin(cmd.Long), inPlugin(cmd.Example)
	for _, sub := range cmd.Commands() {
		asPlugin(sub)
	}
}

// commandInText matches the name of the program at the start of a command in a text.
var commandInText = regexp.MustCompile("(?m)(^  |`|sudo -E |<\\(|sudo )kubevpn( |`)")

// inPlugin returns a text with the commands of the plugin.
func inPlugin(text string) string {
	return commandInText.ReplaceAllString(text, "${1}"+pluginName+"${2}")
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Show help for a command",
		Example: command.Examples("Show the help of connect", "kubevpn help connect"),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, rest, err := cmd.Root().Find(args)
			switch {
			case err != nil || len(rest) > 0 && target == cmd.Root():
				return unknownCommand(cmd.Root(), args[0])
			case len(rest) > 0:
				return api.Errorf(api.ExitUsage, "`kubevpn help` accepts one command, but got %q after it", rest[0]).
					WithHint("see `%s --help` for usage", target.CommandPath())
			}
			target.InitDefaultHelpFlag()
			return target.Help()
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion,
			cobra.ShellCompDirective) {
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

// unknownHelp returns the error of unknownCommand if the arguments ask for help with an unknown command. Cobra would
// show the help of kubevpn and succeed.
func unknownHelp(root *cobra.Command, args []string) error {
	wantsHelp := slices.Contains(args, "--help") || slices.Contains(args, "-h")
	if !wantsHelp || strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		return nil
	}
	target, rest, err := root.Find(args)
	name := slices.IndexFunc(rest, func(arg string) bool { return !strings.HasPrefix(arg, "-") })
	if err != nil || target != root || name < 0 {
		return nil
	}
	return unknownCommand(root, rest[name])
}

func unknownCommand(root *cobra.Command, name string) error {
	err := api.Errorf(api.ExitUsage, "unknown command %q for %q", name, root.CommandPath())
	if similar := root.SuggestionsFor(name); len(similar) > 0 {
		return err.WithHint("did you mean `kubevpn %s`?", strings.Join(similar, "` or `kubevpn "))
	}
	return err.WithHint("`kubevpn --help` lists the commands")
}

// flagError explains err and suggests the flag that the user probably meant.
func flagError(cmd *cobra.Command, err error) error {
	e := api.Errorf(api.ExitUsage, "%w", err)
	if value, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		e = api.Errorf(api.ExitUsage, "--%s: %q is invalid: %s", value.GetFlag().Name, value.GetValue(),
			requirement(value))
	}
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok && unknown.GetSpecifiedShortnames() == "" {
		if similar := similarFlags(cmd.Flags(), unknown.GetSpecifiedName()); len(similar) > 0 {
			return e.WithHint("did you mean --%s?", strings.Join(similar, " or --"))
		}
	}
	return e.WithHint("`%s --help` lists the flags", cmd.CommandPath())
}

// requirement returns the requirement that the value of a flag does not meet. Parse errors of the standard library do
// not contain it.
func requirement(e *pflag.InvalidValueError) string {
	switch kind := e.GetFlag().Value.Type(); {
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "must be an integer"
	case kind == "bool":
		return "must be true or false"
	case kind == "duration":
		return "must be a duration such as 10s or 1m"
	}
	return e.Unwrap().Error()
}

// similarFlags returns the visible flags whose names begin with name, or from which a few characters of it differ.
func similarFlags(flags *pflag.FlagSet, name string) []string {
	var all []string
	flags.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			all = append(all, f.Name)
		}
	})
	return similar(name, all)
}

// similar returns the names that begin with name, or from which a few characters of it differ.
func similar(name string, all []string) []string {
	// Cobra compares only the names of commands.
	names := &cobra.Command{SuggestionsMinimumDistance: min(2, len(name)/3)}
	for _, other := range all {
		names.AddCommand(&cobra.Command{Use: other, Run: func(*cobra.Command, []string) {}})
	}
	return names.SuggestionsFor(name)
}
