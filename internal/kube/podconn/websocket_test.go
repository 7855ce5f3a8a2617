package podconn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
)

// Frames of RFC 6455, 5.7, and others, as a server sends them.
func TestWebSocketReadParsesFrames(t *testing.T) {
	long := bytes.Repeat([]byte("x"), 300)
	tests := []struct {
		name string
		wire []byte
		want string
		err  error
		pong string
	}{
		{"binary", []byte("\x82\x05Hello"), "Hello", io.ErrUnexpectedEOF, ""},
		{"fragments", []byte("\x02\x03Hel\x80\x02lo"), "Hello", io.ErrUnexpectedEOF, ""},
		{"ping between fragments", []byte("\x02\x03Hel\x89\x04ping\x80\x02lo"), "Hello", io.ErrUnexpectedEOF, "ping"},
		{"16-bit length", append([]byte("\x82\x7e\x01\x2c"), long...), string(long), io.ErrUnexpectedEOF, ""},
		{"64-bit length", append([]byte("\x82\x7f\x00\x00\x00\x00\x00\x00\x01\x2c"), long...), string(long), io.ErrUnexpectedEOF, ""},
		{"empty message", []byte("\x82\x00\x82\x01a"), "a", io.ErrUnexpectedEOF, ""},
		{"pong", []byte("\x8a\x00\x82\x01a"), "a", io.ErrUnexpectedEOF, ""},
		{"close", []byte("\x82\x01a\x88\x02\x03\xe8"), "a", nil, ""},
		{"close without code", []byte("\x88\x00"), "", nil, ""},
		{"cut in a header", []byte("\x82\x7e\x01"), "", io.ErrUnexpectedEOF, ""},
		{"cut in payload", []byte("\x82\x05Hel"), "Hel", io.ErrUnexpectedEOF, ""},
		{"text", []byte("\x81\x05Hello"), "", errWebSocket, ""},
		{"masked", []byte("\x82\x81\x01\x02\x03\x04a"), "", errWebSocket, ""},
		{"reserved bit", []byte("\xc2\x01a"), "", errWebSocket, ""},
		{"continuation of nothing", []byte("\x80\x01a"), "", errWebSocket, ""},
		{"message in a message", []byte("\x02\x01a\x82\x01b"), "a", errWebSocket, ""},
		{"long ping", []byte("\x89\x7e\x01\x2c"), "", errWebSocket, ""},
		{"fragmented ping", []byte("\x09\x00"), "", errWebSocket, ""},
		{"unknown opcode", []byte("\x8b\x00"), "", errWebSocket, ""},
		{"absurd length", []byte("\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff"), "", errWebSocket, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var pong string
			ws := newWebSocket(readWriter{bytes.NewReader(tt.wire), nil})
			ws.pong = func(p []byte) { pong = string(p) }
			got, err := io.ReadAll(ws)
			if string(got) != tt.want || !errors.Is(err, tt.err) || pong != tt.pong {
				t.Fatalf("read %q, %v, pong %q; want %q, %v, %q", got, err, pong, tt.want, tt.err, tt.pong)
			}
		})
	}
}

func TestWebSocketReadReportsTheCloseCode(t *testing.T) {
	ws := newWebSocket(readWriter{bytes.NewReader([]byte("\x88\x09\x03\xf3no room")), nil})
	_, err := ws.Read(make([]byte, 1))
	if err == nil || err.Error() != `the API server closed the WebSocket with code 1011: "no room"` {
		t.Fatal(err)
	}
}

func TestWebSocketWriteMasksFrames(t *testing.T) {
	for _, n := range []int{0, 1, 125, 126, 127, 65535, 65536, 100_000} {
		payload := make([]byte, n)
		for i := range payload {
			payload[i] = byte(i)
		}
		var out bytes.Buffer
		writes := 0
		ws := newWebSocket(countWrites{readWriter{nil, &out}, &writes})
		if err := ws.writeFrame(append(make([]byte, headroom), payload...)); err != nil {
			t.Fatal(err)
		}
		if got := unmask(t, out.Bytes()); !bytes.Equal(got, payload) || writes != 1 {
			t.Fatalf("%d bytes: %d came out, in %d writes", n, len(got), writes)
		}
	}
}

// unmask reads one masked binary frame, byte by byte.
func unmask(t *testing.T, wire []byte) []byte {
	t.Helper()
	if wire[0] != 0x82 || wire[1]&0x80 == 0 {
		t.Fatalf("frame begins with % x", wire[:2])
	}
	n, at := int(wire[1]&0x7f), 2
	switch n {
	case 126:
		n, at = int(binary.BigEndian.Uint16(wire[2:])), 4
	case 127:
		n, at = int(binary.BigEndian.Uint64(wire[2:])), 10
	}
	key, payload := wire[at:at+4], wire[at+4:]
	if len(payload) != n {
		t.Fatalf("%d bytes of payload, want %d", len(payload), n)
	}
	out := make([]byte, n)
	for i := range out {
		out[i] = payload[i] ^ key[i%4]
	}
	return out
}

// RFC 6455, 1.3.
func TestAcceptKeyFollowsRFC6455(t *testing.T) {
	if got := acceptKey("dGhlIHNhbXBsZSBub25jZQ=="); got != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		t.Fatal(got)
	}
}

func FuzzWebSocketRead(f *testing.F) {
	f.Add([]byte("\x02\x03Hel\x89\x04ping\x80\x02lo\x88\x02\x03\xe8"), uint8(3))
	f.Add([]byte("\x82\x7f\x00\x00\x00\x00\x00\x00\x01\x2c"), uint8(1))
	f.Fuzz(func(t *testing.T, wire []byte, step uint8) {
		ws := newWebSocket(readWriter{bytes.NewReader(wire), nil})
		buf := make([]byte, int(step)+1)
		total := 0
		for {
			n, err := ws.Read(buf)
			total += n
			if n > len(buf) || total > len(wire) {
				t.Fatalf("read %d bytes from %d bytes of frames", total, len(wire))
			}
			if err != nil {
				return
			}
			if n == 0 {
				t.Fatal("Read returned neither a byte nor an error")
			}
		}
	})
}

func BenchmarkMask(b *testing.B) {
	p := make([]byte, 64<<10)
	b.SetBytes(int64(len(p)))
	b.ReportAllocs()
	for b.Loop() {
		mask(p, [4]byte{1, 2, 3, 4})
	}
}
