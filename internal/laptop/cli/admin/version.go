package admin

import (
	"context"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/process/version"
)

func newVersion(f *command.Factory) *cobra.Command {
	output := term.NewObjectFormat("text")
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of this program, of the daemon and of the service",
		Example: command.Examples("Print the versions", "kubevpn version", "Print the versions as JSON",
			"kubevpn version -o json"),
		RunE: func(cmd *cobra.Command, _ []string) error { return printVersions(cmd.Context(), f, output) },
	}
	output.AddTo(cmd)
	return cmd
}

func printVersions(ctx context.Context, f *command.Factory, output *term.Format) error {
	v, err := f.Version(ctx)
	if err != nil {
		return err
	}
	if !output.ForPeople() {
		return output.Print(f.Out, v, "version/"+v.Version)
	}
	PrintVersion(f.Out)
	if !tested(v.Platform) {
		fmt.Fprintf(f.Out, "untested  this program compiles for %s, and nobody has run it there\n", v.Platform)
	}
	if v.Daemon != nil {
		fmt.Fprintf(f.Out, "daemon  %s\n", *v.Daemon)
	}
	if v.Service != "" {
		fmt.Fprintf(f.Out, "service %s\n", v.Service)
	}
	return nil
}

// tested reports whether the tests of the repository run on a system. docs/platforms.md names them.
func tested(platform string) bool { return platform == "linux/amd64" }

// PrintVersion prints the version of this program.
func PrintVersion(w io.Writer) {
	fmt.Fprintf(w, "kubevpn %s, %s, %s/%s\n", version.Full(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
