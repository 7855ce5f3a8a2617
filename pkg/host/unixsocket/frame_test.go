package unixsocket

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

const limit = 16 << 20

func TestFramesFollowEachOther(t *testing.T) {
	var stream bytes.Buffer
	sent := []string{"", "first", strings.Repeat("x", 100_000)}
	for _, message := range sent {
		b, err := frame(message, limit)
		if err != nil {
			t.Fatal(err)
		}
		stream.Write(b)
	}
	whole := stream.Bytes()
	for name, r := range map[string]io.Reader{
		"whole": bytes.NewReader(whole), "byte_by_byte": iotest.OneByteReader(bytes.NewReader(whole)),
	} {
		for _, want := range sent {
			var got string
			if err := readFrame(r, &got, limit); err != nil || got != want {
				t.Errorf("%s: read %d bytes, %v; want %d", name, len(got), err, len(want))
			}
		}
		if err := readFrame(r, new(string), limit); err != io.EOF {
			t.Errorf("%s: at the end: %v", name, err)
		}
	}
	for n := 1; n < 30; n++ {
		var err error
		for r := bytes.NewReader(whole[:n]); err == nil; {
			err = readFrame(r, new(string), limit)
		}
		ends := n == 6 || n == 6+11 // after the first and the second frame
		if ends != (err == io.EOF) || !ends && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	}
}

func TestFramesAreBounded(t *testing.T) {
	const wanted = "more than the limit of 16777216"
	if _, err := frame(strings.Repeat("x", limit-1), limit); err == nil || !strings.Contains(err.Error(), wanted) {
		t.Errorf("frame of a message that is too long: %v", err)
	}
	if b, err := frame(strings.Repeat("x", limit-2), limit); err != nil || len(b) != frameHeader+limit {
		t.Errorf("frame of the longest message: %d bytes, %v", len(b), err)
	}
	r := strings.NewReader("\x01\x00\x00\x01 and more")
	if err := readFrame(r, new(string), limit); err == nil || !strings.Contains(err.Error(), wanted) || r.Len() != 9 {
		t.Errorf("announced message that is too long: %v, and %d bytes are left", err, r.Len())
	}
	// An announced length alone costs no memory.
	asked := &asked{r: strings.NewReader("\x01\x00\x00\x00x")}
	if err := readFrame(asked, new(string), limit); !errors.Is(err, io.ErrUnexpectedEOF) || asked.most > 1<<16 {
		t.Errorf("a message that does not arrive: %v, with a buffer of %d bytes", err, asked.most)
	}
}

// asked notes the size of the largest buffer that it is asked to fill.
type asked struct {
	r    io.Reader
	most int
}

func (a *asked) Read(b []byte) (int, error) {
	a.most = max(a.most, len(b))
	return a.r.Read(b)
}

func FuzzReadFrame(f *testing.F) {
	for _, message := range []any{map[string]any{"id": 1}, []int{1}, "text", nil} {
		b, err := frame(message, limit)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, []byte{})
		f.Add(b[:len(b)-1], b)
	}
	f.Add([]byte("\xff\xff\xff\xff{}"), []byte("{}"))
	f.Fuzz(func(t *testing.T, first, second []byte) {
		stream := bytes.NewReader(append(append([]byte{}, first...), second...))
		for {
			before := stream.Len()
			var r any
			err := readFrame(stream, &r, limit)
			if used := before - stream.Len(); used > frameHeader+limit {
				t.Fatalf("read %d bytes", used)
			}
			if err != nil {
				return
			}
			b, err := frame(r, limit)
			if err != nil {
				t.Fatal(err)
			}
			var again any
			if err := readFrame(bytes.NewReader(b), &again, limit); err != nil {
				t.Fatalf("its own frame: %v", err)
			}
			if c, err := frame(again, limit); err != nil || !bytes.Equal(b, c) {
				t.Fatalf("sent %q, received %q, %v", b, c, err)
			}
		}
	})
}
