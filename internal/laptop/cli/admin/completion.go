package admin

import (
	"slices"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
)

func newCompletion(f *command.Factory) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print the completion script for a shell",
		Long: "Print a completion script for bash, zsh, fish or powershell. It completes commands, flags, contexts,\n" +
			"namespaces, workloads and connections.",
		Example: command.Examples(
			"Enable completion in this shell", "source <(kubevpn completion bash)",
			"Enable completion in every new bash",
			"kubevpn completion bash > ~/.local/share/bash-completion/completions/kubevpn",
			"Enable completion in zsh and fish",
			"kubevpn completion zsh > \"${fpath[1]}/_kubevpn\"",
			"kubevpn completion fish > ~/.config/fish/completions/kubevpn.fish",
		),
		ValidArgs: shells,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 || !slices.Contains(shells, args[0]) {
				return api.Errorf(api.ExitUsage, "`kubevpn completion` requires the name of a shell").
					WithHint("specify bash, zsh, fish or powershell")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(f.Out, true)
			case "zsh":
				return root.GenZshCompletion(f.Out)
			case "fish":
				return root.GenFishCompletion(f.Out, true)
			}
			return root.GenPowerShellCompletionWithDesc(f.Out)
		},
	}
}
