//go:build !race

package nonblock

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Read calls read(2), and repeats it when a signal interrupts it. fd must be nonblocking: unix.EAGAIN means no data.
func Read(fd uintptr, p []byte) (int, error) {
	return call(unix.SYS_READ, fd, unsafe.Pointer(unsafe.SliceData(p)), len(p))
}

// Write calls write(2) in the same way. It may write less than p.
func Write(fd uintptr, p []byte) (int, error) {
	return call(unix.SYS_WRITE, fd, unsafe.Pointer(unsafe.SliceData(p)), len(p))
}

// Vector holds the arguments of Writev. Its reuse avoids an allocation.
type Vector []unix.Iovec

// Set makes v refer to pieces, which must not change until Writev has returned. It omits empty pieces.
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

// Clear drops the references to the pieces.
func (v *Vector) Clear() {
	clear(*v)
	*v = (*v)[:0]
}

// Writev calls writev(2) in the same way.
func Writev(fd uintptr, v Vector) (int, error) {
	return call(unix.SYS_WRITEV, fd, unsafe.Pointer(unsafe.SliceData(v)), len(v))
}
