package guest

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestFramesAreReadAsWritten(t *testing.T) {
	var b bytes.Buffer
	f := &frames{w: &b}
	long := strings.Repeat("x", largest+1)
	if err := f.write(kindDone, nil); err != nil {
		t.Fatal(err)
	}
	if n, err := io.WriteString(stream{f, kindOutput}, long); n != len(long) || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	for _, want := range []struct {
		kind    kind
		content string
	}{
		{kindDone, ""}, {kindOutput, long[:largest]}, {kindOutput, "x"},
	} {
		k, content, err := readFrame(&b)
		if k != want.kind || string(content) != want.content || err != nil {
			t.Errorf("kind %d, %d bytes, %v; want %d, %d bytes", k, len(content), err, want.kind, len(want.content))
		}
	}
	if _, _, err := readFrame(&b); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

func TestBrokenFramesAreRejected(t *testing.T) {
	for _, test := range []struct {
		name, bytes string
		want        error
	}{
		{"header", "\x01\x00\x00", io.ErrUnexpectedEOF},
		{"content", "\x01\x00\x00\x00\x02a", io.ErrUnexpectedEOF},
		{"nothing-of-the-content", "\x01\x00\x00\x00\x02", io.ErrUnexpectedEOF},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, _, err := readFrame(strings.NewReader(test.bytes)); !errors.Is(err, test.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	if _, _, err := readFrame(strings.NewReader("\x01\xff\xff\xff\xff")); err == nil || err.Error() != "a frame of 4294967295 bytes" {
		t.Errorf("too large: %v", err)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00\x02ab"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		k, content, err := readFrame(r)
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := (&frames{w: &again}).write(k, content); err != nil {
			t.Fatal(err)
		}
		if read := b[:len(b)-r.Len()]; !bytes.Equal(read, again.Bytes()) {
			t.Errorf("read %q, written again %q", read, again.Bytes())
		}
	})
}
