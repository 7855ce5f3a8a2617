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

// detach puts the command into a session of its own: it has no terminal, so closing ours, and Ctrl-C, are
// none of its business.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }

// sendFile sends one byte, and the descriptor with it.
func sendFile(conn *net.UnixConn, f *os.File) error {
	if _, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(f.Fd())), nil); err != nil {
		return fmt.Errorf("handing the root helper over: %w", err)
	}
	return nil
}

func closeOnExec(f *os.File) { unix.CloseOnExec(int(f.Fd())) }
