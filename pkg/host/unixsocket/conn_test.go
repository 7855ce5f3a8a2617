//go:build unix

package unixsocket

import (
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// conns returns both ends of a stream.
func conns(t *testing.T) (a, b *Conn) {
	t.Helper()
	first, second, err := Pair("stream")
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*Conn
	for i, f := range []*os.File{first, second} {
		if ends[i], err = Open(f, limit); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}

// request is a message.
type request struct {
	ID   uint64
	Name string
}

// pipe returns a pipe whose write end is still to be sent.
func pipe(t *testing.T) (read, write *os.File) {
	t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { read.Close(); write.Close() })
	return read, write
}

func TestDescriptorArrivesWithItsMessage(t *testing.T) {
	a, b := conns(t)
	read, write := pipe(t)
	long := strings.Repeat("x", 4<<20) // more than the socket holds
	sent := make(chan error, 1)
	go func() {
		for _, m := range []struct {
			message string
			f       syscall.Conn
		}{{"before", nil}, {long, write}, {"after", nil}, {"short", write}} {
			if err := b.Send(request{Name: m.message}, m.f); err != nil {
				sent <- err
				return
			}
		}
		sent <- b.Close()
	}()
	for _, want := range []struct {
		message string
		file    bool
	}{{"before", false}, {long, true}, {"after", false}, {"short", true}} {
		var r request
		f, err := a.Receive(&r, "it")
		if err != nil || r.Name != want.message || (f != nil) != want.file {
			t.Fatalf("received %d bytes, file %v, %v; want %d, %v", len(r.Name), f, err, len(want.message), want.file)
		}
		if f == nil {
			continue
		}
		if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags of the descriptor: %#x, %v", flags, err)
		}
		if _, err := f.WriteString("it"); err != nil {
			t.Error(err)
		}
		f.Close()
	}
	if _, err := a.Receive(new(request), "it"); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	write.Close()
	if b, err := io.ReadAll(read); string(b) != "itit" || err != nil {
		t.Errorf("the files received %q, %v", b, err)
	}
}

// Without a name, Receive takes no descriptors, otherwise one with each message.
func TestUnexpectedDescriptorsAreClosed(t *testing.T) {
	a, b := conns(t)
	read, write := pipe(t)
	if err := a.Send(request{ID: 1}, write); err != nil {
		t.Fatal(err)
	}
	if f, err := b.Receive(new(request), ""); f != nil || err != nil {
		t.Errorf("received %v, %v", f, err)
	}
	whole, err := frame(request{ID: 1}, limit)
	if err != nil {
		t.Fatal(err)
	}
	for _, piece := range [][]byte{whole[:3], whole[3:]} { // each with a descriptor
		if _, err := Send(b.UnixConn, piece, write); err != nil {
			t.Fatal(err)
		}
	}
	if f, err := a.Receive(new(request), "it"); f != nil || err == nil || !strings.Contains(err.Error(), "more than one") {
		t.Errorf("received %v, %v", f, err)
	}
	write.Close()
	if n, err := read.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("a descriptor is still open: %d, %v", n, err)
	}
}

func TestConcurrentMessagesStayWhole(t *testing.T) {
	a, b := conns(t)
	const senders, each = 8, 50
	var sending sync.WaitGroup
	for i := range senders {
		sending.Go(func() {
			for range each {
				if err := a.Send(request{ID: uint64(i), Name: strings.Repeat("x", 1000*i)}, nil); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	go func() {
		sending.Wait()
		_ = a.CloseWrite() // receive sees it
	}()
	received := 0
	for {
		var r request
		_, err := b.Receive(&r, "")
		if err == io.EOF {
			break
		}
		if err != nil || len(r.Name) != 1000*int(r.ID) {
			t.Fatalf("message %d has %d bytes, %v", r.ID, len(r.Name), err)
		}
		received++
	}
	if received != senders*each {
		t.Errorf("received %d messages", received)
	}
	// The other direction is still open.
	if err := b.Send(request{ID: 1}, nil); err != nil {
		t.Error(err)
	}
	if _, err := a.Receive(new(request), "it"); err != nil {
		t.Error(err)
	}
}

func TestSendFailsAfterAPartOfAMessage(t *testing.T) {
	a, b := conns(t)
	first := make(chan error, 1)
	go func() { first <- b.Send(request{Name: strings.Repeat("x", 8<<20)}, nil) }() // more than the socket holds
	if _, err := a.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil { // CloseRead would not wake a send that waits for room
		t.Fatal(err)
	}
	err := <-first
	if err == nil || b.Send(request{}, nil) != err {
		t.Errorf("send: %v, and then not the same", err)
	}
}

func TestOpenAcceptsOnlyUnixStreams(t *testing.T) {
	_, write := pipe(t)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	tcp, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]*os.File{
		"pipe": write, "datagrams": os.NewFile(uintptr(fds[0]), "datagrams"), "tcp": os.NewFile(uintptr(tcp), "tcp"),
	} {
		if _, err := Open(f, limit); err == nil {
			t.Errorf("Open accepted %s", name)
		}
	}
}
