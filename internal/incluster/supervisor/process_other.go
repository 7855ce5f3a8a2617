//go:build !linux

package supervisor

import (
	"context"
	"errors"
	"fmt"
)

func (s *Supervisor) runCommand(context.Context) (int, error) {
	return 0, fmt.Errorf("a container's command: %w", errors.ErrUnsupported)
}
