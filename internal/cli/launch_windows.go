package cli

import (
	"errors"
	"net"
	"os"
	"os/exec"
)

// detach leaves the command as it is: starting a daemon fails on Windows (it takes no ExtraFiles).
func detach(*exec.Cmd) {}

func sendFile(*net.UnixConn, *os.File) error {
	return errors.New("the root helper cannot be handed over on Windows yet")
}

// closeOnExec has nothing to do: handles are not inherited unless they are listed.
func closeOnExec(*os.File) {}
