package unixsocket

import (
	"errors"
	"os"
)

// Dup returns an error: nothing on Windows needs a second descriptor.
func Dup(*os.File, string) (*os.File, error) { return nil, errors.ErrUnsupported }
