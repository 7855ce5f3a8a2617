package command

import (
	"iter"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
)

// AddGlobal defines the flags of all commands.
func AddGlobal(root *cobra.Command, f *Factory) {
	flags := root.PersistentFlags()
	flags.IntVarP(&f.Verbosity, "v", "v", 0,
		"verbosity of the log on standard error: 6 prints requests to the API server, 8 also their content")
	flags.BoolVarP(&f.Quiet, "quiet", "q", false, "print only results and errors")
	flags.IntVar(&f.Events, "events", 0, "file descriptor for the events, as lines of JSON")
	flags.Lookup("events").Hidden = true // for `kubevpn up`
	flags.VisitAll(func(f *pflag.Flag) { f.Annotations = map[string][]string{sectionAnnotation: {SectionGlobal}} })
}

// The sections of a command's flags in its help. A flag without one is in the first.
const (
	SectionCommand    = "Flags"
	SectionConnection = "Flags for the connection"
	SectionCluster    = "Flags for the cluster"
	SectionGlobal     = "Global flags"
)

// sectionAnnotation is the key of a flag's annotation that contains its section.
const sectionAnnotation = "kubevpn_section"

// Section puts the flags that define adds to the command into a section.
func Section(cmd *cobra.Command, title string, define func(*pflag.FlagSet)) {
	before := map[string]bool{}
	cmd.Flags().VisitAll(func(f *pflag.Flag) { before[f.Name] = true })
	define(cmd.Flags())
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if before[f.Name] {
			return
		}
		if f.Annotations == nil {
			f.Annotations = map[string][]string{}
		}
		f.Annotations[sectionAnnotation] = []string{title}
	})
}

func sectionOf(f *pflag.Flag) string {
	switch title := f.Annotations[sectionAnnotation]; {
	case len(title) > 0:
		return title[0]
	case f.Name == "help":
		return SectionGlobal
	}
	return SectionCommand
}

// Sections yields the sections of the command's flags that are not empty.
func Sections(cmd *cobra.Command) iter.Seq2[string, *pflag.FlagSet] {
	return func(yield func(string, *pflag.FlagSet) bool) {
		for _, title := range []string{SectionCommand, SectionConnection, SectionCluster, SectionGlobal} {
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				if sectionOf(f) == title {
					flags.AddFlag(f)
				}
			})
			if flags.HasAvailableFlags() && !yield(title, flags) {
				return
			}
		}
	}
}

// Examples formats an Example. A line that begins with a capital letter is a comment on the commands below it.
func Examples(lines ...string) string {
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

// OneArg returns the check of a command that requires one argument.
func OneArg(what, hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return api.Errorf(api.ExitUsage, "`%s` %s", cmd.CommandPath(), what).WithHint("%s", hint)
		}
		return nil
	}
}

// Complete registers the values of a flag for shell completion.
func Complete(cmd *cobra.Command, flag string, values ...string) {
	CompleteWith(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// CompleteWith registers the completion of a flag.
func CompleteWith(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // the command does not define the flag
	}
}
