package trip

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/pkg/wakeup"
)

// Program is the path of the program with the command trip, in kubevpn's image.
const Program = "/traffic"

// NewCommand returns `traffic trip`.
func NewCommand() *cobra.Command {
	var stay time.Duration
	cmd := &cobra.Command{
		Use:   "trip",
		Short: "Send a request from this pod for 'kubevpn why --from'",
		Long: `Reads an errand from standard input, as JSON: a request to send, or addresses to
connect to. Writes the result to standard output, as JSON.

With --stay it does nothing and ends after that time: it keeps the ephemeral
container in which errands run.`,
		Example: "  traffic trip --stay 10m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			if stay > 0 {
				wakeup.Pause(ctx, stay)
				return nil
			}
			return serve(ctx, os.Stdin, os.Stdout)
		},
	}
	cmd.Flags().DurationVar(&stay, "stay", 0, "time to stay, without an errand")
	return cmd
}
