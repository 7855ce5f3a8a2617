//go:build !linux

package helper

import (
	"context"
	"os"
	"runtime"

	"kubevpn/internal/api"
)

func unsupported() *api.Error {
	return api.Errorf(api.ExitPrivilege, "kubevpn has no root helper on %s yet", runtime.GOOS).
		WithHint("run `kubevpn connect --foreground` as root")
}

// Start fails.
func Start(context.Context, StartConfig) (*os.File, error) { return nil, unsupported() }

// Main fails.
func Main(context.Context) error { return unsupported() }
