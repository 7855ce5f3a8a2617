//go:build !linux

package helper

import (
	"context"
	"log/slog"
	"os"
	"runtime"

	"kubevpn/internal/api"
)

func unsupported() *api.Error {
	return api.Errorf(api.ExitPrivilege, "kubevpn has no root helper on %s yet", runtime.GOOS).
		WithHint("run `kubevpn connect --foreground` as root")
}

// Client is not implemented on this system: NewClient returns an error.
type Client struct{ *Local }

// NewClient fails.
func NewClient(*os.File, *slog.Logger) (*Client, error) { return nil, unsupported() }

// Start fails.
func Start(context.Context, StartConfig) (*os.File, error) { return nil, unsupported() }

// Main fails.
func Main(context.Context) error { return unsupported() }

// Serve fails.
func Serve(context.Context, *os.File, LocalConfig) error { return unsupported() }
