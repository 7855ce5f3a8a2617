package cli

import (
	"fmt"
	"io"
	"iter"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// The sections of a command's flags in its help. A flag without one is in the first.
const (
	sectionCommand    = "Flags"
	sectionConnection = "Flags for the connection"
	sectionCluster    = "Flags for the cluster"
	sectionGlobal     = "Global flags"
)

// sectionAnnotation is the key of a flag's annotation that contains its section.
const sectionAnnotation = "kubevpn_section"

// section puts the flags that define adds to the command into a section.
func section(cmd *cobra.Command, title string, define func(*pflag.FlagSet)) {
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
		return sectionGlobal
	}
	return sectionCommand
}

// printUsage is cobra's usage with the flags in sections.
func printUsage(cmd *cobra.Command) error {
	var b strings.Builder
	b.WriteString("Usage:\n")
	if cmd.Runnable() {
		fmt.Fprintf(&b, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "  %s [command]\n", cmd.CommandPath())
	}
	if cmd.HasExample() {
		fmt.Fprintf(&b, "\nExamples:\n%s\n", cmd.Example)
	}
	printCommands(&b, cmd)
	for title, flags := range sections(cmd) {
		fmt.Fprintf(&b, "\n%s:\n%s", title, flags.FlagUsages())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\nUse \"%s [command] --help\" for more information about a command.\n", cmd.CommandPath())
	}
	_, err := io.WriteString(cmd.OutOrStdout(), b.String())
	return err
}

// sections yields the sections of the command's flags that are not empty.
func sections(cmd *cobra.Command) iter.Seq2[string, *pflag.FlagSet] {
	return func(yield func(string, *pflag.FlagSet) bool) {
		for _, title := range []string{sectionCommand, sectionConnection, sectionCluster, sectionGlobal} {
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

// printCommands lists the commands below cmd in their groups.
func printCommands(w io.Writer, cmd *cobra.Command) {
	groups := cmd.Groups()
	if len(groups) == 0 && cmd.HasAvailableSubCommands() {
		groups = []*cobra.Group{{Title: "Available Commands:"}}
	}
	for _, group := range groups {
		fmt.Fprintf(w, "\n%s\n", group.Title)
		for _, sub := range cmd.Commands() {
			if sub.GroupID == group.ID && sub.IsAvailableCommand() {
				fmt.Fprintf(w, "  %-*s %s\n", sub.NamePadding(), sub.Name(), sub.Short)
			}
		}
	}
}
