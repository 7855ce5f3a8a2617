package interceptor

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

var errHeadTooLong = errors.New("the head is longer than 1 MiB")

// readHead reads the head of an HTTP/1 message into b, to its empty line; empty lines before it belong to it. It calls
// more, if not nil, with what it has before a read that may have to wait.
func readHead(br *bufio.Reader, b []byte, more func([]byte)) ([]byte, error) {
	b = b[:0]
	begun, partial := false, false // a line has begun; the latest piece has no end of its line
	for {
		if more != nil {
			if rest, _ := br.Peek(br.Buffered()); bytes.IndexByte(rest, '\n') < 0 {
				more(b)
			}
		}
		line, err := br.ReadSlice('\n')
		b = append(b, line...)
		switch {
		case len(b) > maxHead:
			return b, errHeadTooLong
		case err == bufio.ErrBufferFull:
			begun, partial = true, true
		case err == io.EOF && len(b) > 0:
			return b, io.ErrUnexpectedEOF
		case err != nil:
			return b, err
		case partial || len(line) > len(endOf(line)):
			begun, partial = true, false
		case begun:
			return b, nil
		}
	}
}

// endOf returns the end of the line with which b ends.
func endOf(b []byte) []byte {
	if bytes.HasSuffix(b, []byte("\r\n")) {
		return b[len(b)-2:]
	}
	return b[len(b)-1:]
}

// head is the head of an HTTP/1 message: as it was sent, because it crosses like this, and as this package reads it.
type head struct {
	raw    []byte
	first  string // the request line or status line
	header http.Header
	// odd says why another reader could see another end of this message or of its head, and so another beginning of the
	// next message. RFC 9112, 11.2.
	odd string
}

// parseHead reads what it can. It accepts more than net/http: names and values with any characters, which do not change
// where the message ends.
func parseHead(raw []byte) *head {
	h := &head{raw: raw, header: make(http.Header)}
	text := strings.TrimLeft(string(raw), "\r\n")
	h.first, text = cutLine(text)
	var last string
	for text != "" {
		var line string
		if line, text = cutLine(text); line == "" {
			break
		}
		if line[0] == ' ' || line[0] == '\t' { // RFC 9112, 5.2: it continues the line before
			if values := h.header[last]; len(values) > 0 {
				values[len(values)-1] += " " + strings.Trim(line, " \t")
			}
			if isLength(last) || isLength(line) {
				h.odd = "a header that says its length continues in the next line"
			}
			continue
		}
		name, value, _ := strings.Cut(line, ":")
		last = textproto.CanonicalMIMEHeaderKey(strings.TrimRight(name, " \t"))
		if isLength(name) && last != name && !strings.EqualFold(last, name) {
			h.odd = "the name of a header that says its length has other characters"
		}
		h.header[last] = append(h.header[last], strings.Trim(value, " \t"))
	}
	if bytes.IndexByte(raw, 0) >= 0 ||
		bytes.Count(raw, []byte("\r")) != bytes.Count(raw, []byte("\r\n")) {
		h.odd = "its head has NUL, or CR without LF"
	}
	return h
}

func cutLine(text string) (line, rest string) {
	line, rest, _ = strings.Cut(text, "\n")
	return strings.TrimSuffix(line, "\r"), rest
}

// isLength reports whether a reader that ignores odd characters could read a name, or the line of one, as that of a
// header by which a message ends.
func isLength(name string) bool {
	name, _, _ = strings.Cut(name, ":")
	name = strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z' || c == '-':
			return c
		case c >= 'A' && c <= 'Z':
			return c + 'a' - 'A'
		}
		return -1
	}, name)
	return name == "content-length" || name == "transfer-encoding"
}

// The lengths of bodies that end in another way.
const (
	chunked  = -1
	untilEnd = -2 // of the connection
)

// length returns the length of the body by its headers, and untilEnd if they do not say it or contradict each other.
// Then odd is set.
func (h *head) length(version string) int64 {
	codings, lengths := h.header["Transfer-Encoding"], h.header["Content-Length"]
	switch {
	case len(codings) > 0:
		all := strings.Split(strings.ToLower(strings.Join(codings, ",")), ",")
		last := strings.Trim(all[len(all)-1], " \t")
		once := strings.Count(strings.Join(all, ","), "chunked") == 1
		switch {
		case last != "chunked" || !once || version == "HTTP/1.0":
			h.odd = "its Transfer-Encoding does not say where it ends"
			return untilEnd
		case len(lengths) > 0:
			h.odd = "it has both Content-Length and Transfer-Encoding"
		}
		return chunked
	case len(lengths) > 0:
		n, err := strconv.ParseUint(lengths[0], 10, 62)
		if err != nil || len(slices.Compact(slices.Clone(lengths))) > 1 {
			h.odd = "its Content-Length is no number, or several"
			return untilEnd
		}
		return int64(n)
	}
	return untilEnd
}

// request returns the request, and why it is none that this package can forward. Its Body and Context are not set.
func (h *head) request() (r *http.Request, why string) {
	method, rest, _ := strings.Cut(h.first, " ")
	space := strings.LastIndexByte(rest, ' ')
	if space < 0 || !httpguts.ValidHeaderFieldName(method) {
		return nil, "the request line is malformed"
	}
	target, version := rest[:space], rest[space+1:]
	minor, ok := strings.CutPrefix(version, "HTTP/1.")
	if !ok || len(minor) != 1 || minor[0] < '0' || minor[0] > '9' {
		return nil, "its version is not HTTP/1"
	}
	r = &http.Request{Method: method, RequestURI: target, Proto: version, ProtoMajor: 1,
		ProtoMinor: int(minor[0] - '0'), Header: h.header, Host: h.header.Get("Host")}
	r.ContentLength = h.length(version)
	switch {
	case h.odd != "":
		return nil, h.odd
	case r.ContentLength == untilEnd: // RFC 9112, 6.3: a request without a length has no body
		r.ContentLength = 0
	}
	var err error
	if r.URL, err = url.ParseRequestURI(target); err != nil { // for matching alone: the target crosses as it is
		path, query, _ := strings.Cut(target, "?")
		r.URL = &url.URL{Path: path, RawQuery: query}
	}
	if r.URL.Host != "" {
		r.Host = r.URL.Host
	}
	for _, names := range h.header["Trailer"] {
		for name := range strings.SplitSeq(names, ",") {
			if r.Trailer == nil {
				r.Trailer = make(http.Header)
			}
			r.Trailer[http.CanonicalHeaderKey(strings.Trim(name, " \t"))] = nil
		}
	}
	return r, ""
}

// status returns the status code of an answer; 0: there is none.
func (h *head) status() int {
	fields := strings.Fields(h.first)
	if len(fields) < 2 || !strings.HasPrefix(fields[0], "HTTP/") {
		return 0
	}
	code, err := strconv.Atoi(fields[1])
	if err != nil || code < 100 || code > 999 {
		return 0
	}
	return code
}

// closes reports whether the sender closes the connection after this message. RFC 9112, 9.3.
func (h *head) closes() bool {
	says := func(what string) bool { return httpguts.HeaderValuesContainsToken(h.header["Connection"], what) }
	old := strings.HasPrefix(h.first, "HTTP/1.0") || strings.HasSuffix(h.first, " HTTP/1.0")
	return says("close") || old && !says("keep-alive")
}

// extend adds a value to a list: to the last line that has the header, or as a line.
func (h *head) extend(name, value string) {
	at := -1 // the end of that line's text
	for n, line := 0, []byte(nil); n < len(h.raw); n += len(line) {
		line = h.raw[n : n+bytes.IndexByte(h.raw[n:], '\n')+1]
		field, _, ok := bytes.Cut(line, []byte(":"))
		if ok && strings.EqualFold(string(bytes.TrimRight(field, " \t")), name) {
			at = n + len(line) - len(endOf(line))
		}
	}
	if at < 0 {
		h.add(name + ": " + value)
	} else {
		h.raw = slices.Concat(h.raw[:at], []byte(", "+value), h.raw[at:])
	}
}

// add adds a line to the head.
func (h *head) add(line string) {
	end := len(h.raw) - len(endOf(h.raw))
	h.raw = slices.Concat(h.raw[:end], []byte(line+"\r\n"), h.raw[end:])
}

// dropH2C removes the client's offer to continue in HTTP/2, in which judge would not see the requests that follow. RFC
// 9113, 3.1, lets a server ignore it.
func (h *head) dropH2C() {
	if !strings.Contains(strings.ToLower(strings.Join(h.header["Upgrade"], ",")), "h2c") {
		return
	}
	upgrade, options := without(h.header["Upgrade"], "h2c"), "HTTP2-Settings"
	if upgrade == "" {
		options += ",Upgrade"
	}
	connection := without(h.header["Connection"], options)
	h.drop("Upgrade", "Connection", "Http2-Settings")
	for _, left := range [][2]string{{"Connection", connection}, {"Upgrade", upgrade}} {
		if left[1] != "" {
			h.header.Set(left[0], left[1])
			h.add(left[0] + ": " + left[1])
		}
	}
}

// drop removes headers. Their names are canonical.
func (h *head) drop(names ...string) {
	var raw []byte
	dropped := false
	for line := range bytes.Lines(h.raw) {
		if dropped && (line[0] == ' ' || line[0] == '\t') {
			continue
		}
		name, _, _ := bytes.Cut(line, []byte(":"))
		dropped = slices.Contains(names, textproto.CanonicalMIMEHeaderKey(string(bytes.TrimRight(name, " \t"))))
		if !dropped {
			raw = append(raw, line...)
		}
	}
	h.raw = raw
	for _, name := range names {
		delete(h.header, name)
	}
}

// without returns the elements of a header's lists but those in a list.
func without(values []string, list string) string {
	var left []string
	for v := range strings.SplitSeq(strings.Join(values, ","), ",") {
		v = strings.Trim(v, " \t")
		named := func(w string) bool { return strings.EqualFold(v, w) }
		if v != "" && !slices.ContainsFunc(strings.Split(list, ","), named) {
			left = append(left, v)
		}
	}
	return strings.Join(left, ", ")
}
