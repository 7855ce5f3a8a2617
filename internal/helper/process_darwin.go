package helper

import "os"

// thisProgram returns the path of the running program. macOS cannot start a program that is only open, so its directory
// should belong to root.
func thisProgram() (string, error) { return os.Executable() }

// creator does not know: macOS records the peer of a connection, not that of a socketpair (uipc_usrreq.c of XNU). Only
// a process that inherited the socket from the caller of sudo has it.
func creator(int) (uid int, known bool, err error) { return 0, false, nil }
