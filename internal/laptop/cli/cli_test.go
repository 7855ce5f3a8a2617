package cli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

func TestEveryCommandHasExamples(t *testing.T) {
	var check func(cmd *cobra.Command)
	check = func(cmd *cobra.Command) {
		if cmd.Hidden {
			return
		}
		if cmd.Example == "" || cmd.Short == "" {
			t.Errorf("`%s` lacks an example or a short text", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			if strings.TrimSpace(line) != "" && !strings.HasPrefix(line, "  ") {
				t.Errorf("`%s`: the example's line %q is not indented", cmd.CommandPath(), line)
			}
		}
		for _, sub := range cmd.Commands() {
			check(sub)
		}
	}
	check(newRoot(&command.Factory{}, false))
}
