//go:build !race

package rawio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Read is read(2), repeated when a signal interrupts it. fd must not block: unix.EAGAIN says that nothing is there.
func Read(fd uintptr, p []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		if errno != unix.EINTR {
			return result(n, errno)
		}
	}
}

// Write is write(2), in the same way. It may write less than p.
func Write(fd uintptr, p []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		if errno != unix.EINTR {
			return result(n, errno)
		}
	}
}

// Vector holds what Writev needs, so that it can be used again without an allocation.
type Vector []unix.Iovec

// Set makes v describe pieces, which must stay as they are until Writev has returned. Empty ones are left out.
func (v *Vector) Set(pieces [][]byte) {
	*v = (*v)[:0]
	for _, p := range pieces {
		if len(p) > 0 {
			iov := unix.Iovec{Base: unsafe.SliceData(p)}
			iov.SetLen(len(p))
			*v = append(*v, iov)
		}
	}
}

// Clear lets go of the pieces.
func (v *Vector) Clear() {
	clear(*v)
	*v = (*v)[:0]
}

// Writev is writev(2), in the same way.
func Writev(fd uintptr, v Vector) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(v))), uintptr(len(v)))
		if errno != unix.EINTR {
			return result(n, errno)
		}
	}
}

func result(n uintptr, errno unix.Errno) (int, error) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
