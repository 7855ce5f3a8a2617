package workload

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/project"
)

func newInit(f *command.Factory) *cobra.Command {
	var kube command.ClusterFlags
	file := project.DefaultFile
	cmd := &cobra.Command{
		Use:   "init TYPE/NAME",
		Short: "Write a first kubevpn.yaml, for kubevpn up",
		Long: "Write a first kubevpn.yaml, which `kubevpn up` starts: your requests for a workload come to this\n" +
			"machine. It does not replace a file.",
		Example: command.Examples("Pick a workload, and start the file", "kubevpn init", "kubevpn up",
			"Name the workload", "kubevpn init deployment/web -n shop"),
		Args: oneWorkload("add others to the file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.Report(cmd.Context(), nil, func(ctx context.Context, on func(api.Event), _ func()) error {
				s, err := kube.Login(ctx, on)
				if err != nil {
					return err
				}
				text := firstProject(s.Prepared.Context, s.Prepared.Namespace, args[0])
				out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
				if errors.Is(err, fs.ErrExist) {
					return api.Errorf(api.ExitUsage, "%s exists", file).
						WithHint("`kubevpn up` starts it; -f names another file")
				} else if err != nil {
					return err
				}
				if _, err := out.WriteString(text); err != nil {
					return errors.Join(err, out.Close())
				}
				f.Note("wrote %s: `kubevpn up` starts what it lists", file)
				return out.Close()
			})
		},
		ValidArgsFunction: kube.CompleteWorkloads,
	}
	cmd.Flags().StringVarP(&file, "file", "f", file, "file to write")
	kube.AddTo(cmd, f)
	kube.PickWorkload(cmd)
	return cmd
}

// firstProject returns a file for one workload, with what to try next as comments.
func firstProject(kubeContext, namespace, workload string) string {
	_, name, _ := strings.Cut(workload, "/")
	return fmt.Sprintf(`# kubevpn up starts what this file lists; each key is a flag: kubevpn help up
defaults:
  # context: %q
  namespace: %q
  headers: ["x-user=${USER}"]   # only your requests
proxy:
  %q:
    workload: %q
# dev:                          # or run a program here, as the container
#   %[3]q:
#     workload: %[4]q
#     command: [go, run, .]
`, kubeContext, namespace, name, workload)
}
