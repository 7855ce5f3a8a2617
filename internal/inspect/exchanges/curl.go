// Package exchanges formats the exchanges that intercepts record for other programs: as an HTTP Archive (HAR), and as
// commands that repeat a request (Curl). Exchanges come from the cluster, and may contain anything.
package exchanges

import (
	"encoding/base64"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"kubevpn/internal/api"
	"kubevpn/pkg/redact"
)

// target returns the URL of a request. Its host is the one that the client named, or the pod's address if a URL cannot
// contain that one.
func target(e *api.Exchange) *url.URL {
	to := &url.URL{Scheme: e.Request.Scheme, Host: e.Request.Host, Path: "/"}
	if to.Scheme != "https" {
		to.Scheme = "http"
	}
	switch {
	case isHost(to.Host):
	case e.Server.IsValid():
		to.Host = e.Server.String()
	default:
		to.Host = "unknown.invalid"
	}
	path, query, found := strings.Cut(e.Request.Path, "?")
	if !strings.HasPrefix(path, "/") {
		path = "/"
	}
	to.Opaque = "//" + to.Host + escape(path)
	to.RawQuery, to.ForceQuery = escape(query), found && query == ""
	return to
}

// isHost reports whether s is HOST or HOST:PORT.
func isHost(s string) bool {
	u, err := url.Parse("http://" + s + "/")
	return err == nil && u.Host == s && u.Hostname() != "" && strings.Trim(s,
		"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:-_[]") == ""
}

// escape escapes the bytes that a URL cannot contain.
func escape(s string) string {
	var b strings.Builder
	hex := func(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f' }
	for n := range len(s) {
		c := s[n]
		switch {
		case c == '%' && (n+2 >= len(s) || !hex(s[n+1]) || !hex(s[n+2])),
			c <= ' ' || c >= 0x7f || strings.IndexByte("\"#<>[\\]^`{|}", c) >= 0:
			fmt.Fprintf(&b, "%%%02X", c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// notRepeated are headers that curl writes itself, or that belong to the connection.
var notRepeated = map[string]bool{
	"Connection": true, "Content-Length": true, "Host": true, "Http2-Settings": true, "Keep-Alive": true,
	"Proxy-Connection": true, "Te": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true,
}

// Curl returns commands for a POSIX shell that repeat a request to the same pod: comments on missing parts, then one
// command. Each word is quoted, so that the shell runs no text of the request.
func Curl(e *api.Exchange) string {
	var b strings.Builder
	to := target(e)
	r := &e.Request
	words := []string{"curl", "--globoff", "--path-as-is"}
	if e.Server.IsValid() && to.Host != e.Server.String() {
		// curl knows no zones
		words = append(words, "--connect-to",
			fmt.Sprint("::", netip.AddrPortFrom(e.Server.Addr().WithZone(""), e.Server.Port())))
	}
	if strings.HasPrefix(r.Proto, "HTTP/2") && to.Scheme == "http" {
		words = append(words, "--http2-prior-knowledge")
	}
	switch r.Method {
	case http.MethodGet:
	case http.MethodHead:
		words = append(words, "--head")
	default:
		words = append(words, "--request", r.Method)
	}
	words = append(words, headerWords(e, to.Host)...)
	piped := ""
	if r.Body.Size > 0 {
		if int64(len(r.Body.Data)) < r.Body.Size {
			fmt.Fprintf(&b, "# the body has %d bytes, of which %d were recorded\n", r.Body.Size, len(r.Body.Data))
		}
		switch text := string(r.Body.Data); {
		case text == "":
		case utf8.ValidString(text) && api.Clean(text) == text:
			words = append(words, "--data-raw", text)
		default:
			piped = "printf %s " + base64.StdEncoding.EncodeToString(r.Body.Data) + " | base64 -d | "
			words = append(words, "--data-binary", "@-")
		}
	}
	if r.Path != "" && !strings.HasPrefix(r.Path, "/") {
		words = append(words, "--request-target", r.Path)
	}
	words = append(words, to.String())
	missing := slices.Sorted(maps.Keys(r.Headers)) // whose values are not known
	missing = slices.DeleteFunc(missing, func(name string) bool { return !slices.Contains(e.Redacted, name) })
	if len(missing) > 0 {
		fmt.Fprintf(&b, "# without %s: redacted\n", api.CleanLine(strings.Join(missing, ", ")))
	}
	for _, part := range []string{"path", "request body"} {
		if slices.Contains(e.Redacted, part) {
			fmt.Fprintf(&b, "# the %s has %s in place of secrets\n", part, redact.Mark)
		}
	}
	if e.Truncated {
		b.WriteString("# the head of the request is incomplete: it was too long\n")
	}
	b.WriteString(piped + strings.Join(api.Texts(words, quote), " ") + "\n")
	return b.String()
}

// headerWords returns the options for the headers. curl's own headers are left out if the request lacks them.
func headerWords(e *api.Exchange, host string) []string {
	var words []string
	h := e.Request.Headers
	if host != e.Request.Host && e.Request.Host != "" {
		words = append(words, "--header", "Host: "+e.Request.Host)
	}
	for _, name := range slices.Sorted(maps.Keys(h)) {
		if notRepeated[name] || slices.Contains(e.Redacted, name) || !httpguts.ValidHeaderFieldName(name) {
			continue // curl could read another name as something else, such as a file
		}
		for _, value := range h[name] {
			header := name + ";" // without a value
			if value = api.OneLine(value); value != "" {
				header = name + ": " + value
			}
			words = append(words, "--header", header)
		}
	}
	own := []string{"Accept", "User-Agent"}
	if e.Request.Body.Size > 0 {
		own = append(own, "Content-Type")
	}
	for _, name := range own {
		if _, known := h[name]; !known {
			words = append(words, "--header", name+":")
		}
	}
	return words
}

// quote makes s one word of a shell command. Unlike api.ShellQuote it keeps the lines of a body.
func quote(s string) string {
	if !strings.ContainsAny(s, "\n\t") {
		return api.ShellQuote(s)
	}
	return "'" + strings.ReplaceAll(api.Clean(s), "'", `'\''`) + "'"
}
