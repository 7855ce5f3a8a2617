//go:build race

package rawio

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// The race detector takes a write and the read of what it wrote for a happens-before edge, of which it hears from the
// system calls of the standard library. So these are they.

// Read is read(2).
func Read(fd uintptr, p []byte) (int, error) {
	return again(func() (int, error) { return syscall.Read(int(fd), p) })
}

// Write is write(2).
func Write(fd uintptr, p []byte) (int, error) {
	return again(func() (int, error) { return syscall.Write(int(fd), p) })
}

// Vector holds what Writev needs.
type Vector [][]byte

// Set makes v describe pieces.
func (v *Vector) Set(pieces [][]byte) { *v = append((*v)[:0], pieces...) }

// Clear lets go of the pieces.
func (v *Vector) Clear() {
	clear(*v)
	*v = (*v)[:0]
}

// Writev is writev(2).
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
