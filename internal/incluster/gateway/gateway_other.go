//go:build !linux

package gateway

import (
	"context"
	"log/slog"
	"runtime"

	"kubevpn/internal/api"
)

func run(context.Context, *slog.Logger) error {
	return api.Errorf(api.ExitNetstack, "the gateway runs in a pod, on Linux; this is %s", runtime.GOOS)
}
