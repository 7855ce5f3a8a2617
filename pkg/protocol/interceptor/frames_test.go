package interceptor

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// fields encodes "name: value" lines.
func fields(lines ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		e.WriteField(hpack.HeaderField{Name: name, Value: value})
	}
	return b.Bytes()
}

// answer2 answers each stream with what say writes.
func answer2(t *testing.T, say func(f *http2.Framer, id uint32)) string {
	return listen(t, func(c net.Conn) {
		if _, err := io.ReadFull(c, make([]byte, len(preface2))); err != nil {
			return // the connection that net/http dials in advance
		}
		f := http2.NewFramer(c, c)
		f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		f.WriteSettings()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				if !frame.IsAck() {
					f.WriteSettingsAck()
				}
			case *http2.MetaHeadersFrame:
				say(f, frame.StreamID)
			case *http2.PingFrame:
				if !frame.IsAck() {
					f.WritePing(true, frame.Data)
				}
			}
		}
	})
}

// ask2 sends a request, and returns the frames of its answer as text.
func ask2(t *testing.T, addr string, ends bool) string {
	t.Helper()
	c := dial(t, addr)
	io.WriteString(c, preface2)
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	f.WriteSettings()
	head2(f, 1, ends, ":method: POST", ":scheme: http", ":path: /", ":authority: a")
	var got, data string
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return fmt.Sprint(got, data, err)
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				f.WriteSettingsAck()
			}
			continue
		case *http2.MetaHeadersFrame:
			var all []string
			for _, field := range frame.Fields {
				all = append(all, field.Name+": "+field.Value)
			}
			slices.Sort(all)
			got += data + strings.Join(all, "\n") + "\n\n"
			data = ""
		case *http2.DataFrame:
			data += string(frame.Data())
		case *http2.RSTStreamFrame:
			return got + data + frame.ErrCode.String()
		default:
			continue
		}
		if frame.Header().Flags.Has(http2.FlagDataEndStream) {
			return got + data + "END"
		}
	}
}

// Nobody ends the read of a body that net/http has closed before: the handler would wait for it, and the client for the
// end of the answer.
func TestBodyThatWasClosedIsNotRead(t *testing.T) {
	never, _ := io.Pipe()
	b := &requestBody{ReadCloser: never}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Read(make([]byte, 1)); err == nil {
		t.Error("no error")
	}
}

// head2 writes HEADERS.
func head2(f *http2.Framer, id uint32, ends bool, lines ...string) {
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: ends,
		BlockFragment: fields(lines...)})
}

// Fields, data and end of an answer are the application's, also if it ends before the request does. It may have other
// frames of data.
func TestHTTP2AnswersCrossUnchanged(t *testing.T) {
	const grpc = "content-type: application/grpc"
	long := "grpc-message: " + strings.Repeat("a", 14<<10)
	type frames func(f *http2.Framer, id uint32)
	only := func(lines ...string) frames {
		return func(f *http2.Framer, id uint32) { head2(f, id, true, lines...) }
	}
	data := func(data string, trailer []string, lines ...string) frames {
		return func(f *http2.Framer, id uint32) {
			head2(f, id, false, lines...)
			if data != "" || len(trailer) == 0 {
				f.WriteData(id, len(trailer) == 0, []byte(data))
			}
			if len(trailer) > 0 {
				head2(f, id, true, trailer...)
			}
		}
	}
	reset := func(by frames, code http2.ErrCode) frames {
		return func(f *http2.Framer, id uint32) { by(f, id); f.WriteRSTStream(id, code) }
	}
	for name, say := range map[string]frames{
		"only-trailers":           only(":status: 200", grpc, "grpc-status: 5", "grpc-message: no"),
		"only-trailers-and-reset": reset(only(":status: 200", "grpc-status: 16"), http2.ErrCodeNo),
		"trailers-after-nothing":  data("", []string{"grpc-status: 0"}, ":status: 200", grpc),
		"long-trailers":           data("data", []string{"grpc-status: 13", long}, ":status: 200", grpc),
		"trailers-and-reset":      reset(data("data", []string{"a: b"}, ":status: 200"), http2.ErrCodeCancel),
		"data":                    data("data", nil, ":status: 200", "set-cookie: a", "set-cookie: b", "x-a: "),
		"data-and-reset":          reset(data("data", nil, ":status: 413"), http2.ErrCodeNo),
		"no-data":                 data("", nil, ":status: 200"),
		"length":                  data("data", nil, ":status: 200", "content-length: 4"),
		"no-length":               only(":status: 404", "x-a: "),
		"no-bytes":                only(":status: 200", "content-length: 0"),
		"204":                     only(":status: 204"),
		"304":                     only(":status: 304", "etag: a", "content-length: 7"),
		"103": func(f *http2.Framer, id uint32) {
			head2(f, id, false, ":status: 103", "link: a")
			head2(f, id, true, ":status: 200")
		},
	} {
		for _, ends := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s-request-ends-%v", name, ends), func(t *testing.T) {
				app := answer2(t, say)
				r := newRig(t, app)
				want := ask2(t, app, ends)
				if got := ask2(t, r.addr, ends); got != want {
					t.Errorf("the client got\n%s\nwithout the interceptor\n%s", got, want)
				}
			})
		}
	}
}
