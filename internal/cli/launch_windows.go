package cli

import (
	"errors"
	"net"
	"os"
	"os/exec"
)

// detach does nothing: the start of a daemon fails on Windows, which does not support ExtraFiles.
func detach(*exec.Cmd) {}

func sendFile(*net.UnixConn, *os.File) error {
	return errors.New("the root helper is not supported on Windows yet")
}

// closeOnExec does nothing: child processes inherit only handles that are listed.
func closeOnExec(*os.File) {}
