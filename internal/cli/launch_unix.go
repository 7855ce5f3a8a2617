//go:build unix

package cli

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// detach starts the command in a new session, so that Ctrl-C and the end of this terminal do not affect it.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }

// sendFile sends one byte with the descriptor.
func sendFile(conn *net.UnixConn, f *os.File) error {
	if _, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(f.Fd())), nil); err != nil {
		return fmt.Errorf("cannot send the socket of the root helper: %w", err)
	}
	return nil
}

func closeOnExec(f *os.File) { unix.CloseOnExec(int(f.Fd())) }
