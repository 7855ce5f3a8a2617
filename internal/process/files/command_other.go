//go:build !linux

package files

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// NewCommand returns a command that fails: files are served by containers, which run Linux.
func NewCommand() *cobra.Command {
	return &cobra.Command{Use: Command, RunE: func(*cobra.Command, []string) error {
		return fmt.Errorf("serving files of a container: %w", errors.ErrUnsupported)
	}}
}
