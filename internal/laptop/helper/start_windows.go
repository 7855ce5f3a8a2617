package helper

import (
	"context"
	"os"

	"kubevpn/internal/api"
)

func unsupported() *api.Error {
	return api.Errorf(api.ExitPrivilege, "kubevpn cannot change the network of Windows").
		WithHint("`kubevpn connect --socks` and `kubevpn run` need no change")
}

// Start fails.
func Start(context.Context, StartConfig) (*os.File, error) { return nil, unsupported() }

// Main fails.
func Main(context.Context) error { return unsupported() }
