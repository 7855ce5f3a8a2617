package nonblock

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Message holds the arguments of Send and Receive for a UDP socket. Its reuse avoids allocations. Use it from one
// goroutine at a time.
//
// A message is one datagram, or several of one flow that cross the kernel together (UDP_SEGMENT, UDP_GRO): all have the
// same size, except that the last may be shorter.
type Message struct {
	header  unix.Msghdr
	vector  unix.Iovec
	control struct {
		header unix.Cmsghdr
		data   [8]byte
	}
}

const controlLen = int(unsafe.Sizeof(Message{}.control))

// set makes the message consist of p, and of a control message of n bytes or, if n is 0, none.
func (m *Message) set(p []byte, n int) {
	m.vector.Base = unsafe.SliceData(p)
	m.vector.SetLen(len(p))
	m.header = unix.Msghdr{Iov: &m.vector}
	m.header.SetIovlen(1)
	if n > 0 {
		m.header.Control = (*byte)(unsafe.Pointer(&m.control))
		m.header.SetControllen(n)
	}
}

// Send calls sendmsg(2) for the datagrams in p, each of which has size bytes, except that the last may be shorter. It
// sends all or none. fd must be nonblocking: unix.EAGAIN means that the socket is full.
func (m *Message) Send(fd uintptr, p []byte, size int) error {
	m.set(p, 0)
	if size < len(p) {
		m.set(p, controlLen)
		h := &m.control.header
		h.Level, h.Type = unix.SOL_UDP, unix.UDP_SEGMENT
		h.SetLen(unix.CmsgLen(2))
		binary.NativeEndian.PutUint16(m.control.data[:], uint16(size))
	}
	_, err := call(unix.SYS_SENDMSG, fd, unsafe.Pointer(&m.header), 0)
	m.vector.Base = nil
	return err
}

// Receive calls recvmsg(2) and returns the number of bytes and the size of each datagram in p, as for Send. Datagrams
// that do not fit into p are lost, with unix.EMSGSIZE if none does. unix.EAGAIN means that there is none.
func (m *Message) Receive(fd uintptr, p []byte) (n, size int, err error) {
	m.set(p, controlLen)
	n, err = call(unix.SYS_RECVMSG, fd, unsafe.Pointer(&m.header), 0)
	m.vector.Base = nil
	if err != nil {
		return 0, 0, err
	}
	size = n
	h := &m.control.header
	if int(m.header.Controllen) >= unix.CmsgLen(4) && h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO {
		size = int(binary.NativeEndian.Uint32(m.control.data[:]))
	}
	if m.header.Flags&unix.MSG_TRUNC != 0 {
		if size <= 0 || size >= n {
			return 0, 0, unix.EMSGSIZE
		}
		n -= n % size
	}
	return n, size, nil
}

// call makes a system call whose arguments are a descriptor, a pointer and a number. It repeats the call when a signal
// interrupts it.
func call(number, fd uintptr, p unsafe.Pointer, n int) (int, error) {
	for {
		done, _, errno := unix.RawSyscall(number, fd, uintptr(p), uintptr(n))
		switch errno {
		case 0:
			return int(done), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
