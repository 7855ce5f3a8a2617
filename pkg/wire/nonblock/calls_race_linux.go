//go:build race

package nonblock

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// The race detector learns from the system calls of the standard library that a write happens before the read of
// its data. So this build uses those.

// Read calls read(2).
func Read(fd uintptr, p []byte) (int, error) {
	return again(func() (int, error) { return syscall.Read(int(fd), p) })
}

// Write calls write(2).
func Write(fd uintptr, p []byte) (int, error) {
	return again(func() (int, error) { return syscall.Write(int(fd), p) })
}

// Vector holds the arguments of Writev.
type Vector [][]byte

// Set makes v refer to pieces.
func (v *Vector) Set(pieces [][]byte) { *v = append((*v)[:0], pieces...) }

// Clear drops the references to the pieces.
func (v *Vector) Clear() {
	clear(*v)
	*v = (*v)[:0]
}

// Writev calls writev(2).
func Writev(fd uintptr, v Vector) (int, error) {
	return again(func() (int, error) { return unix.Writev(int(fd), v) })
}

func again(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}
