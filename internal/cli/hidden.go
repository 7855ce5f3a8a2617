package cli

import (
	"context"
	"encoding/json"
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
)

// newDaemon is the process that startDaemon starts.
func newDaemon(a *app) *cobra.Command {
	readyFD := 0
	cmd := &cobra.Command{
		Use:     "daemon",
		Short:   "Keep connections (started by the other commands)",
		Example: examples("See what a daemon does, in the foreground", "kubevpn daemon"),
		Hidden:  true,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.runDaemon(cmd.Context(), readyFD) },
	}
	cmd.Flags().IntVar(&readyFD, "ready-fd", 0, "descriptor on which to say that the daemon answers")
	return cmd
}

// runDaemon tells whoever started it, on the descriptor fd, how the start went: null, or an api.Error.
func (a *app) runDaemon(ctx context.Context, fd int) error {
	tell := func(*api.Error) {}
	if fd > 2 {
		pipe := os.NewFile(uintptr(fd), "ready")
		closeOnExec(pipe) // a credential plugin that lives on would keep it open
		told := false
		tell = func(e *api.Error) {
			if told {
				return
			}
			told = true
			// Whoever started us may be gone by now, which changes nothing.
			_ = json.NewEncoder(pipe).Encode(e)
			_ = pipe.Close()
		}
	}
	paths, err := a.paths()
	if err == nil {
		err = a.RunDaemon(ctx, paths, func() { tell(nil) })
	}
	if err != nil {
		tell(api.AsError(err))
	}
	return err
}

// newHelper is the process that helper.Start starts, as root.
func newHelper(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "helper",
		Short:   "Change this machine's network for a daemon (started by connect, as root)",
		Example: examples("There is no use in running it by hand", "sudo kubevpn helper"),
		Hidden:  true,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.RunHelper(cmd.Context()) },
	}
}
