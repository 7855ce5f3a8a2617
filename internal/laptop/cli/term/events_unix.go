//go:build unix

package term

import "syscall"

func closeOnExec(fd int) { syscall.CloseOnExec(fd) }
