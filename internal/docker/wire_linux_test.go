package docker

import (
	"io"
	"net"
	"strings"
	"testing"
)

// answering is a wire whose other end sends bytes, and reads whatever it is told.
func answering(answer io.Reader) *wire {
	ours, theirs := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, theirs) }() // until ours is closed
	go func() {
		_, _ = io.Copy(theirs, answer) // ours may be closed before all is sent
		theirs.Close()
	}()
	return newWire(ours)
}

// endless is a report that does not end.
type endless struct{ sent int }

func (e *endless) Read(b []byte) (int, error) {
	if e.sent > 16<<20 {
		return 0, io.EOF
	}
	n := copy(b, strings.Repeat("a", len(b)))
	if e.sent == 0 {
		n = copy(b, `{"error":{"text":"`)
	}
	e.sent += n
	return n, nil
}

// A container cannot fill this machine's memory.
func TestReportIsBounded(t *testing.T) {
	var sent endless
	w := answering(&sent)
	if err := w.ask(order{Program: &program{}}); err == nil {
		t.Error("a report without an end was received")
	}
	if err := w.conn.Close(); err != nil {
		t.Fatal(err)
	}
	if most := 4 * reportBytes; sent.sent > most {
		t.Errorf("%d bytes of it were read, want at most %d", sent.sent, most)
	}
}
