//go:build !linux && !darwin

package route

import (
	"context"
	"time"

	"kubevpn/pkg/wakeup"
)

// notice calls event every second until ctx ends. Only Linux and macOS tell of changes here.
func notice(ctx context.Context, event func()) error {
	for event(); wakeup.Pause(ctx, time.Second); {
		event()
	}
	return ctx.Err()
}
