package httpmatch

import (
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// part is the part of a request that has named values.
type part uint8

const (
	inHeader part = iota
	inBaggage
	inCookie
	inQuery
)

func (p part) String() string { return [...]string{"header", "baggage", "cookie", "query"}[p] }

// field is a named value of a Match.
type field struct {
	in   part
	name string // of a header: canonical
	text
}

func newField(in part, n Named) (field, error) {
	value, err := newText(n.Value)
	f := field{in, n.Name, value}
	switch {
	case err != nil:
		return f, err
	case in == inQuery && n.Name == "", in != inQuery && !httpguts.ValidHeaderFieldName(n.Name):
		return f, errors.New("not a name that HTTP allows")
	case in == inHeader:
		f.name = http.CanonicalHeaderKey(n.Name)
	}
	if value.re != nil || in == inBaggage || in == inQuery { // the latter are encoded
		return f, nil
	}
	if !httpguts.ValidHeaderFieldValue(n.Value) || strings.Trim(n.Value, " \t") != n.Value ||
		in == inCookie && strings.Contains(n.Value, ";") {
		return f, fmt.Errorf("%q is no value that a request can have", n.Value)
	}
	return f, nil
}

// String returns text like "x-user" or "baggage user".
func (f *field) String() string {
	if f.in == inHeader {
		return strings.ToLower(f.name)
	}
	return f.in.String() + " " + f.name
}

func (f *field) matches(r *http.Request) bool {
	for value := range f.values(r) {
		if f.text.matches(value) {
			return true
		}
	}
	return false
}

// values returns the values that a request has under the name.
func (f *field) values(r *http.Request) iter.Seq[string] {
	return func(yield func(string) bool) {
		switch f.in {
		case inHeader:
			if f.name == "Host" { // net/http removes it from the headers
				yield(r.Host)
				return
			}
			for _, value := range r.Header[f.name] {
				if !yield(value) {
					return
				}
			}
		case inBaggage:
			eachPair(r.Header["Baggage"], ",", f.name, baggageMember, yield)
		case inCookie:
			eachPair(r.Header["Cookie"], ";", f.name, cookiePair, yield)
		case inQuery:
			eachPair([]string{r.URL.RawQuery}, "&", f.name, queryPair, yield)
		}
	}
}

// eachPair yields the values under a name in lines of pairs.
func eachPair(lines []string, separator, name string, read func(pair string) (name, value string),
	yield func(string) bool) {
	for _, line := range lines {
		for pair := range strings.SplitSeq(line, separator) {
			if n, value := read(pair); n == name && !yield(value) {
				return
			}
		}
	}
}

// baggageMember reads `key = value;property`. The value is percent-encoded UTF-8; only the key's letter case counts:
// https://www.w3.org/TR/baggage/.
func baggageMember(member string) (name, value string) {
	member, _, _ = strings.Cut(member, ";")
	name, value, _ = strings.Cut(member, "=")
	value = textproto.TrimString(value)
	if decoded, err := url.PathUnescape(value); err == nil {
		value = decoded
	}
	return textproto.TrimString(name), value
}

// cookiePair reads a pair of RFC 6265, section 4.2.1. Some clients put the value in quotes.
func cookiePair(pair string) (name, value string) {
	name, value, _ = strings.Cut(textproto.TrimString(pair), "=")
	if n := len(value); n > 1 && value[0] == '"' && value[n-1] == '"' {
		value = value[1 : n-1]
	}
	return name, value
}

func queryPair(pair string) (name, value string) {
	name, value, _ = strings.Cut(pair, "=")
	for _, s := range []*string{&name, &value} {
		if decoded, err := url.QueryUnescape(*s); err == nil {
			*s = decoded
		}
	}
	return name, value
}
