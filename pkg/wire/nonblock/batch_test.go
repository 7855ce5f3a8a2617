package nonblock_test

import (
	"errors"
	"io"
	"net"
	"slices"
	"testing"

	"kubevpn/pkg/wire/nonblock"
)

// calls is a connection that records its writes.
type calls struct {
	net.Conn
	input   []byte
	written []string
	err     error
}

func (c *calls) Read(p []byte) (int, error) {
	n := copy(p, c.input)
	c.input = c.input[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (c *calls) Write(p []byte) (int, error) {
	c.written = append(c.written, string(p))
	return len(p), c.err
}

func TestBatchWritesAtOnce(t *testing.T) {
	c := &calls{input: []byte("abcdef")}
	b := nonblock.NewBatch(c)
	b.Write([]byte("alone"))
	b.Hold()
	b.Write([]byte("to"))
	b.Write([]byte("gether"))
	if n := len(c.written); n != 1 {
		t.Errorf("%d writes before Release", n)
	}
	if err := b.Release(); err != nil {
		t.Error(err)
	}
	b.Write([]byte("again"))
	if n, err := b.Through(pieces{b}, []byte("at once")); n != 7 || err != nil {
		t.Errorf("Through gave %d, %v", n, err)
	}
	if !slices.Equal(c.written, []string{"alone", "together", "again", "at once"}) {
		t.Errorf("written: %q", c.written)
	}
	var buf [3]byte
	if _, err := io.ReadFull(b, buf[:]); err != nil || string(buf[:]) != "abc" || len(c.input) != 0 {
		t.Errorf("read %q, %v, and left %q in the kernel", buf, err, c.input)
	}
	c.err = io.ErrClosedPipe
	b.Hold()
	if _, err := b.Write([]byte("x")); err != nil {
		t.Errorf("a write that was held: %v", err)
	}
	if err := b.Release(); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Release gave %v", err)
	}
	if n, err := b.Through(pieces{b}, []byte("x")); n != 0 || !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Through gave %d, %v", n, err)
	}
}

// pieces writes byte by byte.
type pieces struct{ w io.Writer }

func (p pieces) Write(b []byte) (int, error) {
	for i := range b {
		if n, err := p.w.Write(b[i : i+1]); err != nil {
			return i + n, err
		}
	}
	return len(b), nil
}
