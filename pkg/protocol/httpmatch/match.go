// Package httpmatch matches HTTP requests by headers, path and method.
package httpmatch

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// regexpPrefix begins a value that is a regular expression.
const regexpPrefix = "=~"

// Spec describes requests. All fields that are set must match; the zero Spec matches everything, and also traffic
// that is not HTTP.
//
// A value that begins with "=~" is a regular expression (RE2) for the whole text; another value matches exactly.
type Spec struct {
	Headers []Header `json:"headers,omitempty"`
	// Path is decoded and has no query. "/api" and "/api/" match /api and all paths below it.
	Path    string   `json:"path,omitempty"`
	Methods []string `json:"methods,omitempty"` // a request matches if it has one of them
}

// Header is a header that a request must have. If it is repeated, one of its values must match. The name "host" stands
// for the host of the request, with its port if it has one.
type Header struct {
	Name  string `json:"name"` // in any case
	Value string `json:"value"`
}

// Match matches requests. The zero Match matches every request, and connections that are not HTTP. It is immutable and
// safe for concurrent use.
type Match struct {
	headers []header
	path    *text
	methods []string
}

type header struct {
	name string // canonical
	text
}

// text is a value, or an expression for it.
type text struct {
	exact string
	re    *regexp.Regexp // nil: exact
}

// New compiles a Spec. Its error names the wrong field.
func New(s Spec) (*Match, error) {
	m := new(Match)
	for _, h := range s.Headers {
		parsed, err := newHeader(h)
		if err != nil {
			return nil, fmt.Errorf("header %q: %w", h.Name, err)
		}
		m.headers = append(m.headers, parsed)
	}
	if s.Path != "" {
		path, err := newPath(s.Path)
		if err != nil {
			return nil, fmt.Errorf("path %q: %w", s.Path, err)
		}
		m.path = &path
	}
	for _, method := range s.Methods {
		if !httpguts.ValidHeaderFieldName(method) { // both are tokens: RFC 9110
			return nil, fmt.Errorf("method %q: not a word that HTTP allows", method)
		}
		if method = strings.ToUpper(method); !slices.Contains(m.methods, method) {
			m.methods = append(m.methods, method)
		}
	}
	return m, nil
}

// ParseHeader reads a header as it is written on a command line: "name=value", or "name=~expression".
func ParseHeader(s string) (Header, error) {
	name, value, found := strings.Cut(s, "=")
	if !found || name == "" {
		return Header{}, fmt.Errorf("header %q: not name=value, nor name=~expression", s)
	}
	if strings.HasPrefix(value, "~") {
		value = "=" + value
	}
	return Header{Name: name, Value: value}, nil
}

func newHeader(h Header) (header, error) {
	if !httpguts.ValidHeaderFieldName(h.Name) {
		return header{}, errors.New("not a name that HTTP allows")
	}
	value, err := newText(h.Value)
	if err != nil {
		return header{}, err
	}
	if value.re == nil && (!httpguts.ValidHeaderFieldValue(h.Value) || strings.Trim(h.Value, " \t") != h.Value) {
		return header{}, fmt.Errorf("%q is no value that a request can have", h.Value)
	}
	return header{http.CanonicalHeaderKey(h.Name), value}, nil
}

func newPath(s string) (text, error) {
	path, err := newText(s)
	switch {
	case err != nil || path.re != nil:
		return path, err
	case s[0] != '/':
		return path, errors.New("it must begin with a slash")
	case strings.Contains(s, "?"):
		return path, errors.New("the query is no part of it")
	}
	return text{exact: strings.TrimSuffix(s, "/")}, nil
}

func newText(s string) (text, error) {
	expression, isRegexp := strings.CutPrefix(s, regexpPrefix)
	if !isRegexp {
		return text{exact: s}, nil
	}
	if expression == "" {
		return text{}, errors.New("an empty regular expression")
	}
	// Anchor the expression as the parser understood it: the text itself might end within a quote (\Q), or close the
	// group around it.
	parsed, err := syntax.Parse(expression, syntax.Perl)
	if err != nil {
		return text{}, err
	}
	re, err := regexp.Compile(`\A(?:` + parsed.String() + `)\z`)
	if err != nil {
		return text{}, err
	}
	return text{exact: expression, re: re}, nil
}

// All reports whether m matches everything, including connections that are not HTTP.
func (m *Match) All() bool { return len(m.headers) == 0 && m.path == nil && len(m.methods) == 0 }

// Matches reports whether m matches the request, which a server has read: its headers' names are canonical.
func (m *Match) Matches(r *http.Request) bool {
	if len(m.methods) > 0 && !slices.Contains(m.methods, r.Method) {
		return false
	}
	if m.path != nil && !m.path.matchesPath(r.URL.Path) {
		return false
	}
	return !slices.ContainsFunc(m.headers, func(h header) bool { return !h.matches(r) })
}

func (h *header) matches(r *http.Request) bool {
	if h.name == "Host" { // net/http removes it from the headers
		return h.text.matches(r.Host)
	}
	return slices.ContainsFunc(r.Header[h.name], h.text.matches)
}

func (t *text) matches(s string) bool {
	if t.re != nil {
		return t.re.MatchString(s)
	}
	return s == t.exact
}

// matchesPath differs from matches in that an exact path matches the paths below it, too.
func (t *text) matchesPath(path string) bool {
	if t.re != nil {
		return t.re.MatchString(path)
	}
	below, found := strings.CutPrefix(path, t.exact)
	return found && (below == "" || below[0] == '/')
}

// String describes m for people: "x-user=me, path /api, GET or POST"; "everything".
func (m *Match) String() string {
	if m.All() {
		return "everything"
	}
	var parts []string
	for _, h := range m.headers {
		sign := "="
		if h.re != nil {
			sign = regexpPrefix
		}
		parts = append(parts, strings.ToLower(h.name)+sign+h.exact)
	}
	switch {
	case m.path == nil:
	case m.path.re != nil:
		parts = append(parts, "path "+regexpPrefix+m.path.exact)
	default:
		parts = append(parts, "path "+cmp.Or(m.path.exact, "/"))
	}
	if n := len(m.methods); n > 0 {
		methods := m.methods[n-1]
		if n > 1 {
			methods = strings.Join(m.methods[:n-1], ", ") + " or " + methods
		}
		parts = append(parts, methods)
	}
	return strings.Join(parts, ", ")
}

// Disjoint reports whether provably no request fits both: if both name methods and share none, if neither's path
// contains the other's, or if both name a header, one of them with an exact value that the other does not match. Two
// regular expressions count as not disjoint.
//
// A request that repeats a header can have two exact values of it, and fit both. No client sends one by accident, and
// if such matches counted as overlapping, no two users could share a workload by a header. So they count as disjoint,
// and the first match wins.
func Disjoint(a, b *Match) bool {
	if len(a.methods) > 0 && len(b.methods) > 0 &&
		!slices.ContainsFunc(a.methods, func(m string) bool { return slices.Contains(b.methods, m) }) {
		return true
	}
	if a.path != nil && b.path != nil && a.path.re == nil && b.path.re == nil &&
		!a.path.matchesPath(b.path.exact) && !b.path.matchesPath(a.path.exact) {
		return true
	}
	for _, x := range a.headers {
		for _, y := range b.headers {
			if x.name == y.name && disjointTexts(x.text, y.text) {
				return true
			}
		}
	}
	return false
}

func disjointTexts(a, b text) bool {
	switch {
	case a.re == nil:
		return !b.matches(a.exact)
	case b.re == nil:
		return !a.matches(b.exact)
	}
	return false
}
