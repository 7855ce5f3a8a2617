package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/process/version"
)

type versionOptions struct {
	app    *app
	output *term.Format
}

func newVersion(a *app) *cobra.Command {
	o := &versionOptions{app: a, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of this program, of the daemon and of the service",
		Example: examples("Print the versions", "kubevpn version", "Print the versions as JSON",
			"kubevpn version -o json"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.output.AddTo(cmd)
	return cmd
}

// version returns the versions of this program, the daemon and the service.
func (a *app) version(ctx context.Context) (api.Version, error) {
	v := api.Version{
		TypeMeta: api.Type(api.KindVersion),
		Version:  version.String(), Commit: version.Commit(), Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Image: config.Default().Image,
	}
	c, err := a.daemon()
	if err != nil {
		return v, err
	}
	info, err := c.Info(ctx)
	switch {
	case err == nil:
		v.Daemon = &info.Version
	case !errors.Is(err, daemonclient.ErrNoDaemon):
		return v, err
	}
	s, err := hostservice.Status(ctx)
	v.Service = s.Version
	return v, err
}

func (o *versionOptions) run(ctx context.Context) error {
	v, err := o.app.version(ctx)
	if err != nil {
		return err
	}
	if !o.output.ForPeople() {
		return o.output.Print(o.app.Out, v, "version/"+v.Version)
	}
	printVersion(o.app.Out)
	if !tested(v.Platform) {
		fmt.Fprintf(o.app.Out, "untested  this program compiles for %s, and nobody has run it there\n", v.Platform)
	}
	if v.Daemon != nil {
		fmt.Fprintf(o.app.Out, "daemon  %s\n", *v.Daemon)
	}
	if v.Service != "" {
		fmt.Fprintf(o.app.Out, "service %s\n", v.Service)
	}
	return nil
}

// tested reports whether the tests of the repository run on a system. docs/platforms.md names them.
func tested(platform string) bool { return platform == "linux/amd64" }

// printVersion prints the version of this program.
func printVersion(w io.Writer) {
	fmt.Fprintf(w, "kubevpn %s, %s, %s/%s\n", version.Full(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
