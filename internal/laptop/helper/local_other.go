//go:build !linux

package helper

import (
	"os"
	"runtime"

	"kubevpn/internal/api"
)

// markedSocket returns an error: only the redirect of Linux needs a mark.
func markedSocket(string, uint32) (*os.File, error) {
	return nil, api.Errorf(api.ExitNetwork, "sockets have no marks on %s", runtime.GOOS)
}
