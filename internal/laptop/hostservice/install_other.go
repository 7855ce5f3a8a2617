//go:build !linux && !darwin

package hostservice

import (
	"context"
	"runtime"

	"kubevpn/internal/api"
)

// Supported returns an error.
func Supported() error {
	return api.Errorf(api.ExitPrivilege, "kubevpn has no service on %s", runtime.GOOS)
}

// Install fails.
func Install(context.Context, string) error { return Supported() }

// Uninstall does nothing.
func Uninstall(context.Context) error { return nil }

// Status reports that no service is installed.
func Status(context.Context) (api.HelperService, error) { return api.HelperService{}, nil }
