package cli

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"kubevpn/internal/config"
	"kubevpn/internal/version"
)

type versionOptions struct {
	app    *app
	output *format
}

// versions is the output of `version -o json`.
type versions struct {
	Version  string  `json:"version"`
	Commit   string  `json:"commit"`
	Go       string  `json:"go"`
	Platform string  `json:"platform"`
	Image    string  `json:"image"`  // the default image of the traffic manager
	Daemon   *string `json:"daemon"` // null: no daemon is running
}

func newVersion(a *app) *cobra.Command {
	o := &versionOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of this program and of the daemon",
		Example: examples("Print the versions", "kubevpn version", "Print the versions as JSON",
			"kubevpn version -o json"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.output.addTo(cmd)
	return cmd
}

func (o *versionOptions) run(ctx context.Context) error {
	v := versions{
		Version: version.String(), Commit: version.Commit(), Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Image: config.Default().Image,
	}
	c, err := o.app.client()
	if err != nil {
		return err
	}
	info, err := c.info(ctx)
	switch {
	case err == nil:
		v.Daemon = &info.Version
	case !errors.Is(err, errNoDaemon):
		return err
	}
	if o.output.value == "json" {
		writeJSON(o.app.out, v)
		return nil
	}
	fmt.Fprintf(o.app.out, "kubevpn %s, %s, %s\n", version.Full(), v.Go, v.Platform)
	if v.Daemon != nil {
		fmt.Fprintf(o.app.out, "daemon  %s\n", *v.Daemon)
	}
	return nil
}
