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

// pass sends a byte with that many descriptors, and returns the control messages that arrive with it.
func pass(t *testing.T, descriptors int) []byte {
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
	oob := make([]byte, unix.CmsgSpace(4*4))
	_, n, _, _, err := b.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		t.Fatal(err)
	}
	return oob[:n]
}

func TestFileReturnsTheOnlyFileOfAMessage(t *testing.T) {
	f, err := File(pass(t, 1), "it")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 || f.Name() != "it" {
		t.Errorf("%q, flags %d, %v", f.Name(), flags, err)
	}
}

func TestFileClosesWhatItRejects(t *testing.T) {
	for _, descriptors := range []int{0, 2} {
		before := open(t)
		if f, err := File(pass(t, descriptors), "it"); err == nil {
			t.Errorf("%d descriptors: %v", descriptors, f)
		}
		// Both ends of the pair stay open until the test ends.
		if after := open(t); after != before+2 {
			t.Errorf("%d descriptors: %d are open, want %d", descriptors, after, before+2)
		}
	}
	if f, err := File([]byte{1, 2, 3}, "it"); err == nil {
		t.Errorf("garbage: %v", f)
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
