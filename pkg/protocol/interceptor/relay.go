package interceptor

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// relay sends an answer of HTTP/2 to the client.
func relay(w http.ResponseWriter, resp *http.Response) error {
	h := w.Header()
	copyHeader(h, resp.Header)
	// net/http would add these headers if the answer lacks them.
	for _, name := range [...]string{"Content-Length", "Content-Type", "Date"} {
		if _, ok := h[name]; !ok {
			h[name] = nil
		}
	}
	announced := len(resp.Trailer)
	for name := range resp.Trailer {
		h.Add("Trailer", name)
	}
	w.WriteHeader(resp.StatusCode)
	if resp.Body != http.NoBody && resp.StatusCode != http.StatusNotModified { // which may have a length, and no body
		if err := relayBody(w, resp); err != nil {
			return err
		}
	}
	if len(resp.Trailer) == 0 {
		return nil
	}
	if len(resp.Trailer) == announced {
		copyHeader(h, resp.Trailer)
		return nil
	}
	// Trailers that were not announced need a body in chunks.
	if err := http.NewResponseController(w).Flush(); err != nil {
		return errClient{err}
	}
	for name, values := range resp.Trailer {
		h[http.TrailerPrefix+name] = values
	}
	return nil
}

// smallLen is the size of the buffer with which a stream waits.
const smallLen = 1 << 10

// relayBody sends each piece before it waits for another.
func relayBody(w http.ResponseWriter, resp *http.Response) error {
	small := make([]byte, smallLen) // thousands of streams may wait at once
	piece := small
	var large *[copyLen]byte
	defer func() {
		if large != nil {
			copyBuffers.Put(large)
		}
	}()
	held := resp.ContentLength != 0 // w buffers bytes that must not wait
	for {                           // after the last byte, a trailer may follow
		if held {
			if err := http.NewResponseController(w).Flush(); err != nil {
				return errClient{err}
			}
			held = false
		}
		n, err := resp.Body.Read(piece)
		if n > 0 {
			if _, err := w.Write(piece[:n]); err != nil {
				return errClient{err}
			}
			held = n < copyLen/2 // w does not buffer more
		}
		switch {
		case large == nil && n == len(small): // more will probably follow at once
			large = copyBuffers.Get().(*[copyLen]byte)
			piece = large[:]
		case large != nil && n < len(small):
			copyBuffers.Put(large)
			large, piece = nil, small
		}
		switch err {
		case nil:
		case io.EOF:
			return nil
		default:
			return fmt.Errorf("reading the answer: %w", err)
		}
	}
}

// hopByHop are the headers for the next hop only. Those of proxy authentication are not among them: the application may
// be a proxy.
var hopByHop = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true,
	"Upgrade":           true,
}

// named calls f with the headers that Connection declares hop-by-hop.
func named(h http.Header, f func(name string)) {
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			if name = textproto.TrimString(name); name != "" {
				f(http.CanonicalHeaderKey(name))
			}
		}
	}
}

// copyHeader copies the end-to-end headers of src to dst.
func copyHeader(dst, src http.Header) {
	for name, values := range src {
		if !hopByHop[name] {
			dst[name] = values[:len(values):len(values)] // an append to it copies
		}
	}
	named(src, func(name string) { delete(dst, name) })
}

// acceptsTrailers reports whether the client accepts trailers. gRPC servers insist on this header, which is hop-by-hop.
func acceptsTrailers(h http.Header) bool {
	return httpguts.HeaderValuesContainsToken(h["Te"], "trailers")
}

// addForwardedFor adds the client to X-Forwarded-For.
func (c *clientConn) addForwardedFor(h http.Header) {
	const name = "X-Forwarded-For"
	h[name] = []string{strings.Join(append(h[name], c.flow.Client.Addr().Unmap().String()), ", ")}
}

// outgoing returns the request for net/http's client, without a body, which the caller sets.
func outgoing(ctx context.Context, r *http.Request, host string) *http.Request {
	out := &http.Request{
		Method: r.Method,
		URL: &url.URL{Scheme: "http", Host: host, Path: r.URL.Path, RawPath: r.URL.RawPath,
			RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery},
		Host:          r.Host,
		Proto:         r.Proto,
		ProtoMajor:    r.ProtoMajor,
		ProtoMinor:    r.ProtoMinor,
		Header:        make(http.Header, len(r.Header)+1),
		ContentLength: r.ContentLength,
		Trailer:       r.Trailer,
	}
	if strings.HasPrefix(r.RequestURI, "/") && !strings.HasPrefix(r.RequestURI, "//") {
		out.URL = &url.URL{Scheme: "http", Host: host, Opaque: r.RequestURI} // as the client wrote it
	}
	copyHeader(out.Header, r.Header)
	if acceptsTrailers(r.Header) {
		out.Header["Te"] = []string{"trailers"}
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header["User-Agent"] = nil // otherwise net/http sends its own
	}
	return out.WithContext(ctx)
}
