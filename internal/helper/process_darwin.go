package helper

import (
	"os"

	"golang.org/x/sys/unix"
)

// thisProgram returns the path of the running program. macOS cannot start a program that is only open, so its directory
// should belong to root.
func thisProgram() (string, error) { return os.Executable() }

// creator returns the user who connected. macOS does not record who created a socketpair (uipc_usrreq.c of XNU): only a
// process that inherited it from the caller of sudo has it.
func creator(fd int) (uid int, known bool, err error) {
	peer, err := unix.GetsockoptXucred(fd, unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
	if err != nil {
		return 0, false, nil
	}
	return int(peer.Uid), true, nil
}
