package diff

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"kubevpn/internal/api"
)

const (
	maxDifferences = 100     // of two answers
	maxText        = 200     // bytes of a value that are kept
	maxUnpacked    = 4 << 20 // bytes of a compressed body
	absent         = "absent"
)

// Difference is one place in which two answers differ. DiffGroup.Where describes places.
type Difference struct{ Where, From, To string }

// derived are headers of an answer that depend on the connection or the moment, or follow from the body.
var derived = map[string]bool{
	"Alt-Svc": true, "Connection": true, "Content-Length": true, "Date": true, "Keep-Alive": true,
	"Proxy-Connection": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true,
}

// comparison collects the differences of two answers.
type comparison struct {
	ignored    *Ignored
	all        []Difference
	incomplete bool
}

// Compare returns the differences between the answers in two exchanges. from must have an answer. incomplete means that
// a body was longer than what was recorded, so that at most the beginning of the bodies was compared.
func Compare(from, to *api.Exchange, ignored *Ignored) (all []Difference, incomplete bool) {
	c := &comparison{ignored: ignored}
	a, b := from.Response, to.Response
	switch {
	case b == nil:
		c.add("answer", fmt.Sprintf("status %d", a.Status), "none: "+to.Error)
	case a.Status != b.Status: // the other differences follow from it
		c.add("status", fmt.Sprint(a.Status), fmt.Sprint(b.Status))
	default:
		c.headers("header ", a.Headers, b.Headers)
		c.headers("trailer ", a.Trailers, b.Trailers)
		if from.Request.Method != http.MethodHead {
			c.bodies(a, b)
		}
	}
	return c.all, c.incomplete
}

// add adds a difference, unless there are maxDifferences.
func (c *comparison) add(where, from, to string) {
	if len(c.all) >= maxDifferences {
		return
	}
	if n := commonPrefix(from, to); n > maxText/2 && max(len(from), len(to)) > maxText { // begin where they differ
		for n -= maxText / 4; n > 0 && !utf8.RuneStart(from[n]); n-- {
		}
		from, to = "…"+from[n:], "…"+to[n:]
	}
	c.all = append(c.all, Difference{cut(where, maxText), cut(from, maxText), cut(to, maxText)})
}

// commonPrefix returns how many bytes at the beginning are the same.
func commonPrefix[T string | []byte](a, b T) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// names returns the names in two maps, sorted.
func names[M ~map[string]V, V any](a, b M) []string {
	all := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(all)
	return slices.Compact(all)
}

func (c *comparison) headers(what string, a, b http.Header) {
	text := func(h http.Header, name string) string {
		if values := h.Values(name); len(values) > 0 {
			return strings.Join(values, ", ")
		}
		return absent
	}
	for _, name := range names(a, b) {
		from, to := text(a, name), text(b, name)
		if from != to && !derived[name] && !c.ignored.header(name) {
			c.add(what+name, from, to)
		}
	}
}

func (c *comparison) bodies(a, b *api.ExchangeResponse) {
	from, fromWhole, err := unpack(a)
	to, toWhole, err2 := unpack(b)
	if errors.Join(err, err2) != nil {
		c.incomplete = true
		return
	}
	if c.ignored.path(nil) || fromWhole && toWhole && bytes.Equal(from, to) {
		return
	}
	c.incomplete = !fromWhole || !toWhole
	looksJSON := isJSON(a, from) || isJSON(b, to)
	if looksJSON && c.incomplete {
		return // the beginning of a JSON value cannot be decoded
	}
	if looksJSON {
		v, one := decode(from)
		w, other := decode(to)
		if one && other {
			c.values(nil, v, w)
			return
		}
	}
	if c.incomplete {
		if a.Body.Size != b.Body.Size && a.Headers.Get("Content-Encoding") == "" {
			c.add("body bytes", fmt.Sprint(a.Body.Size, " bytes"), fmt.Sprint(b.Body.Size, " bytes"))
		}
		n := min(len(from), len(to))
		from, to = from[:n], to[:n]
	}
	if utf8.Valid(api.WholeRunes(from)) && utf8.Valid(api.WholeRunes(to)) {
		c.texts(string(from), string(to))
		return
	}
	c.binary(from, to)
}

// unpack returns what was recorded of a body, without its compression, and whether that is all of it.
func unpack(r *api.ExchangeResponse) (data []byte, whole bool, err error) {
	data, whole = r.Body.Data, int64(len(r.Body.Data)) == r.Body.Size
	if !strings.EqualFold(r.Headers.Get("Content-Encoding"), "gzip") || len(data) == 0 {
		return data, whole, nil
	}
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, false, err
	}
	data, err = io.ReadAll(io.LimitReader(z, maxUnpacked))
	if errors.Is(err, io.ErrUnexpectedEOF) && !whole {
		err = nil
	}
	return data, whole && len(data) < maxUnpacked, err
}

// isJSON reports whether the headers call a body JSON, or it begins as such.
func isJSON(r *api.ExchangeResponse, data []byte) bool {
	begin := bytes.TrimLeft(data, " \t\r\n")
	return strings.Contains(r.Headers.Get("Content-Type"), "json") ||
		len(begin) > 0 && (begin[0] == '{' || begin[0] == '[')
}

// decode decodes one JSON value, whose numbers keep their text. ok is false if the data is anything else.
func decode(data []byte) (v any, ok bool) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	err := dec.Decode(&v)
	_, end := dec.Token()
	return v, err == nil && errors.Is(end, io.EOF)
}

// values compares two JSON values at a path. The order of members does not matter, the text of numbers does.
func (c *comparison) values(path []step, a, b any) {
	if len(c.all) >= maxDifferences || c.ignored.path(path) {
		return
	}
	switch a := a.(type) {
	case map[string]any:
		if b, same := b.(map[string]any); same {
			for _, name := range names(a, b) {
				c.values(append(path, name), memberOf(a, name), memberOf(b, name))
			}
			return
		}
	case []any:
		if b, same := b.([]any); same {
			if len(a) != len(b) {
				c.value(path, fmt.Sprint(len(a), " items"), fmt.Sprint(len(b), " items"))
			}
			for n := range min(len(a), len(b)) {
				c.values(append(path, n), a[n], b[n])
			}
			return
		}
	default:
		if a == b {
			return
		}
	}
	c.value(path, show(a), show(b))
}

func memberOf(object map[string]any, name string) any {
	if v, known := object[name]; known {
		return v
	}
	return nothing{}
}

// nothing is the value of a member that an object does not have.
type nothing struct{}

func (c *comparison) value(path []step, from, to string) { c.add("body "+pathText(path), from, to) }

// show returns a JSON value as short text.
func show(v any) string {
	switch v := v.(type) {
	case map[string]any:
		return fmt.Sprintf("{%d members}", len(v))
	case []any:
		return fmt.Sprintf("[%d items]", len(v))
	case string:
		return strconv.Quote(v)
	case nothing:
		return absent
	case nil:
		return "null"
	}
	return fmt.Sprint(v) // a number or a truth value
}

// texts compares lines. If their number differs, only the first line that differs is a difference.
func (c *comparison) texts(a, b string) {
	from, to := strings.Split(a, "\n"), strings.Split(b, "\n")
	same := len(from) == len(to)
	for n := range max(len(from), len(to)) {
		one, other := lineOf(from, n), lineOf(to, n)
		switch {
		case one == other: // both are quoted, and whole
		case same:
			c.add(fmt.Sprintf("body line %d", n+1), one, other)
		default:
			prefix := fmt.Sprintf("line %d of %%d: ", n+1)
			c.add("body lines", fmt.Sprintf(prefix, len(from))+one, fmt.Sprintf(prefix, len(to))+other)
			return
		}
	}
}

// lineOf returns the n-th line, in quotes.
func lineOf(lines []string, n int) string {
	if n >= len(lines) {
		return absent
	}
	return strconv.Quote(lines[n])
}

func (c *comparison) binary(a, b []byte) {
	n := commonPrefix(a, b)
	if n == len(a) && n == len(b) {
		return
	}
	text := func(data []byte) string {
		return fmt.Sprintf("%d bytes, % x at byte %d", len(data), data[n:min(n+8, len(data))], n)
	}
	c.add("body bytes", text(a), text(b))
}
