package helper

import "golang.org/x/sys/unix"

// thisProgram returns the running program. It is not the program's path: since sudo checked it, a user who can write
// there could have replaced the program.
func thisProgram() (string, error) { return "/proc/self/exe", nil }

// creator returns the user who created a socketpair, or who connected.
func creator(fd int) (uid int, known bool, err error) {
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, false, err
	}
	return int(peer.Uid), true, nil
}
