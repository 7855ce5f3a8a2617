package unixsocket

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// pass sends a byte with that many descriptors, and returns the other end.
func pass(t *testing.T, descriptors int) *net.UnixConn {
	t.Helper()
	a, b := pair(t)
	var rights []byte
	if descriptors > 0 {
		fds := make([]int, descriptors)
		for i := range fds {
			fds[i] = int(os.Stdin.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := a.WriteMsgUnix([]byte{0}, rights, nil); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReceiveReturnsTheOnlyFileOfAMessage(t *testing.T) {
	n, f, err := Receive(pass(t, 1), make([]byte, 1), "it")
	if err != nil || n != 1 {
		t.Fatal(n, err)
	}
	defer f.Close()
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 || f.Name() != "it" {
		t.Errorf("%q, flags %d, %v", f.Name(), flags, err)
	}
	if n, f, err := Receive(pass(t, 0), make([]byte, 1), "it"); n != 1 || f != nil || err != nil {
		t.Errorf("without a descriptor: %d, %v, %v", n, f, err)
	}
}

func TestReceiveClosesWhatItRejects(t *testing.T) {
	for _, descriptors := range []int{2, 3, 100} { // the kernel discards those without room
		before := open(t)
		if _, f, err := Receive(pass(t, descriptors), make([]byte, 1), "it"); err == nil {
			t.Errorf("%d descriptors: %v", descriptors, f)
		}
		// Both ends of the pair stay open until the test ends.
		if after := open(t); after != before+2 {
			t.Errorf("%d descriptors: %d are open, want %d", descriptors, after, before+2)
		}
	}
}

func open(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestPeerIsThisProcess(t *testing.T) {
	a, _ := pair(t)
	peer, err := Peer(a)
	if err != nil {
		t.Fatal(err)
	}
	if int(peer.Pid) != os.Getpid() || int(peer.Uid) != os.Geteuid() {
		t.Errorf("%+v", peer)
	}
}

func TestDupIsTheSameFileUnderAnotherName(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	dup, err := Dup(write, "kubevpn7")
	if err != nil || dup.Name() != "kubevpn7" {
		t.Fatalf("%v, %v", dup, err)
	}
	defer dup.Close()
	write.Close()
	raw, err := dup.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags of the descriptor: %#x, %v", flags, err)
		}
	}); err != nil {
		t.Error(err)
	}
	if _, err := dup.WriteString("it"); err != nil {
		t.Error(err)
	}
	b := make([]byte, 8)
	if n, err := read.Read(b); err != nil || string(b[:n]) != "it" {
		t.Errorf("the other end read %q, %v", b[:n], err)
	}
	if f, err := Dup(write, "closed"); err == nil {
		f.Close()
		t.Error("a closed file was duplicated")
	}
}
