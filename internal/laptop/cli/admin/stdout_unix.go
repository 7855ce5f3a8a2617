//go:build unix

package admin

import (
	"os"

	"golang.org/x/sys/unix"
)

// takeStdout returns standard output, and puts /dev/null in its place: a write to descriptor 1 whose reader has ended
// would end this process by SIGPIPE.
func takeStdout() (*os.File, error) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	stdout := os.NewFile(uintptr(fd), "stdout")
	if err := unix.Dup2(int(null.Fd()), 1); err != nil {
		stdout.Close()
		return nil, os.NewSyscallError("dup2", err)
	}
	return stdout, nil
}
