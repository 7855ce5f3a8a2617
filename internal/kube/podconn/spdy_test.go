package podconn

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moby/spdystream/spdy"

	"kubevpn/pkg/wire/nonblock"
)

// data is a DATA frame.
func data(stream uint32, flags byte, payload string) []byte {
	b := binary.BigEndian.AppendUint32(nil, stream)
	b = binary.BigEndian.AppendUint32(b, uint32(flags)<<24|uint32(len(payload)))
	return append(b, payload...)
}

func control(kind spdy.ControlFrameType, words ...uint32) []byte {
	return appendControl(nil, kind, words...)
}

func frames(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

var opened = frames(control(spdy.TypeSynReply, errorStream), control(spdy.TypeSynReply, dataStream))

// pipeConn is a connection whose peer has sent everything in advance.
type pipeConn struct {
	net.Conn
	r io.Reader
	w bytes.Buffer
}

func (c *pipeConn) Read(p []byte) (int, error)       { return c.r.Read(p) }
func (c *pipeConn) Write(p []byte) (int, error)      { return c.w.Write(p) }
func (c *pipeConn) Close() error                     { return nil }
func (c *pipeConn) SetDeadline(time.Time) error      { return nil }
func (c *pipeConn) SetWriteDeadline(time.Time) error { return nil }

func recorded(t *testing.T, wire []byte) (*podConn, *pipeConn, error) {
	t.Helper()
	raw := &pipeConn{r: bytes.NewReader(wire)}
	batch := nonblock.NewBatch(raw)
	c, err := openPort(t.Context(), bufferedLink(batch), batch, podAddr{"port-forward", "ns/web", 80}, &opener{port: 80})
	if err == nil {
		t.Cleanup(func() { c.Close() })
	}
	return c, raw, err
}

// The table lists frames that the API server may send after the opening, and the results of Read.
func TestReadHandlesEveryFrame(t *testing.T) {
	const fin = flagFIN
	tests := []struct {
		name string
		wire []byte
		want string
		err  error
	}{
		{"data", frames(data(3, 0, "ab"), data(3, 0, "c"), data(3, fin, "")), "abc", nil},
		{"data with FIN", data(3, fin, "abc"), "abc", nil},
		{"lost connection", data(3, 0, "abc"), "abc", io.ErrUnexpectedEOF},
		{"cut in a header", frames(data(3, 0, "abc"), []byte{0, 0, 0}), "abc", io.ErrUnexpectedEOF},
		{"cut in a frame", data(3, 0, "abc")[:9], "a", io.ErrUnexpectedEOF},
		{"go away", frames(data(3, 0, "a"), control(spdy.TypeGoAway, 0, 0)), "a", io.ErrUnexpectedEOF},
		{"reset", control(spdy.TypeRstStream, 3, 5), "", syscall.ECONNRESET},
		{"error, then reset", frames(data(1, 0, "connection refused"), control(spdy.TypeRstStream, 3, 5)), "", syscall.ECONNREFUSED},
		{"end, then error", frames(data(3, fin, ""), data(1, 0, "connection refused"), data(1, fin, "")), "", syscall.ECONNREFUSED},
		{"end, then no error", frames(data(3, fin, ""), data(1, fin, "")), "", nil},
		{"end, then lost", data(3, fin, ""), "", nil},
		{"end, then error reset", frames(data(3, fin, ""), control(spdy.TypeRstStream, 1, 5)), "", nil},
		{"error in pieces", frames(data(1, 0, "connection "), data(1, fin, "refused")), "", syscall.ECONNREFUSED},
		{"error after data", frames(data(3, 0, "ab"), data(1, fin, "connection reset by peer")), "ab", syscall.ECONNRESET},
		{"error stream ends empty", frames(data(1, fin, ""), data(3, 0, "a"), data(3, fin, "")), "a", nil},
		{"frames that say nothing", frames(control(spdy.TypeSettings, 1, 1, 1), control(spdy.TypeWindowUpdate, 3, 100),
			control(spdy.TypeHeaders, 3, 0, 0, 0), control(99), data(7, 0, "not ours"), data(3, fin, "a")), "a", nil},
		{"short RST_STREAM", control(spdy.TypeRstStream, 3), "", errSPDY},
		{"short PING", control(spdy.TypePing), "", errSPDY},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _, err := recorded(t, frames(opened, tt.wire))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(c)
			if string(got) != tt.want || !errors.Is(err, tt.err) {
				t.Fatalf("read %q, %v; want %q, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

func TestOpeningReportsRefusals(t *testing.T) {
	tests := []struct {
		name string
		wire []byte
		err  error
	}{
		{"both replies", opened, nil},
		{"a pod that speaks first", frames(control(spdy.TypeSynReply, dataStream), data(3, 0, "hello")), nil},
		{"refused at once", frames(control(spdy.TypeSynReply, errorStream), data(1, flagFIN, "connection refused")), syscall.ECONNREFUSED},
		{"reset", control(spdy.TypeRstStream, 3, 3), syscall.ECONNRESET},
		{"silence", nil, io.EOF},
		{"short reply", control(spdy.TypeSynReply), errSPDY},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _, err := recorded(t, tt.wire)
			if err == nil && tt.err != nil {
				_, err = c.Read(make([]byte, 1))
			}
			if !errors.Is(err, tt.err) {
				t.Fatalf("%v, want %v", err, tt.err)
			}
		})
	}
}

// A spdystream server understands the opening: both streams with their headers, in one write.
func TestOpeningIsValidSPDY(t *testing.T) {
	_, opening, err := (&opener{port: 8080}).next()
	if err != nil {
		t.Fatal(err)
	}
	framer, err := spdy.NewFramer(io.Discard, bytes.NewReader(opening[headroom:]))
	if err != nil {
		t.Fatal(err)
	}
	stream := func(id spdy.StreamId, kind string) {
		t.Helper()
		f, err := framer.ReadFrame()
		syn, ok := f.(*spdy.SynStreamFrame)
		if err != nil || !ok {
			t.Fatalf("%T, %v", f, err)
		}
		if syn.StreamId != id || syn.Headers.Get("streamType") != kind || syn.Headers.Get("port") != "8080" || syn.Headers.Get("requestID") != "0" {
			t.Fatalf("stream %d with %v", syn.StreamId, syn.Headers)
		}
	}
	stream(1, "error")
	f, err := framer.ReadFrame()
	if d, ok := f.(*spdy.DataFrame); err != nil || !ok || d.StreamId != 1 || d.Flags != spdy.DataFlagFin {
		t.Fatalf("%#v, %v", f, err)
	}
	stream(3, "data")
}

// Read answers pings, and does not wait for a Write that blocks.
func TestReadAnswersPings(t *testing.T) {
	c, raw, err := recorded(t, frames(opened, control(spdy.TypePing, 2), control(spdy.TypePing, 7), data(3, 0, "a"),
		control(spdy.TypePing, 4), data(3, 0, "b")))
	if err != nil {
		t.Fatal(err)
	}
	raw.w.Reset()
	buf := make([]byte, 1)
	c.Read(buf)
	if want := control(spdy.TypePing, 2); !bytes.Equal(raw.w.Bytes(), want) { // podConn's own pings have odd IDs
		t.Fatalf("wrote % x, want % x", raw.w.Bytes(), want)
	}
	raw.w.Reset()
	c.writeMu.Lock() // like a blocked Write
	if _, err := c.Read(buf); err != nil || buf[0] != 'b' {
		t.Fatal(buf, err)
	}
	if raw.w.Len() > 0 {
		t.Fatal("Read wrote during a Write")
	}
	c.unlockWrite()
	if want := control(spdy.TypePing, 4); !bytes.Equal(raw.w.Bytes(), want) {
		t.Fatalf("wrote % x, want % x", raw.w.Bytes(), want)
	}
}

// An idle connection sends a ping every ten seconds until it is closed.
func TestIdleConnSendsPings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, client := net.Pipe()
		got := make(chan []byte, 10)
		go func() {
			defer close(got)
			buf := make([]byte, 512)
			for {
				n, err := server.Read(buf)
				if err != nil {
					return
				}
				got <- bytes.Clone(buf[:n])
			}
		}()
		go server.Write(opened)
		batch := nonblock.NewBatch(client)
		c, err := openPort(context.Background(), bufferedLink(batch), batch, podAddr{"port-forward", "ns/web", 80}, &opener{port: 80})
		if err != nil {
			t.Fatal(err)
		}
		<-got // the opening
		start := time.Now()
		for i, id := range []uint32{1, 3, 5} {
			if ping := <-got; !bytes.Equal(ping, control(spdy.TypePing, id)) {
				t.Fatalf("wrote % x", ping)
			}
			if at := time.Since(start); at != time.Duration(i+1)*pingPeriod {
				t.Fatalf("ping %d after %v", id, at)
			}
		}
		synctest.Wait() // Close sends no last frames while a write is in progress
		c.Close()
		if bye := <-got; !bytes.Equal(bye, frames(control(spdy.TypeRstStream, 3, uint32(spdy.Cancel)), control(spdy.TypeGoAway, 0, 0))) {
			t.Fatalf("wrote % x", bye)
		}
		if rest, open := <-got; open {
			t.Fatalf("wrote % x after the end", rest)
		}
	})
}

func FuzzPodConn(f *testing.F) {
	f.Add(frames(opened, data(3, 0, "ab"), control(spdy.TypePing, 2), data(1, flagFIN, "why")))
	f.Add(frames(opened, data(3, flagFIN, ""), control(spdy.TypeRstStream, 1, 5)))
	f.Fuzz(func(t *testing.T, wire []byte) {
		c, _, err := recorded(t, wire)
		if err != nil {
			return
		}
		got, err := io.ReadAll(c)
		if len(got) > len(wire) {
			t.Fatalf("read %d bytes from %d bytes of frames", len(got), len(wire))
		}
		if err == nil && len(wire) == 0 {
			t.Fatal("Read returned io.EOF without any frame")
		}
	})
}
