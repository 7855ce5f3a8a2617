// Package httpmatch matches HTTP requests by headers and their parts, query, path and method.
package httpmatch

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
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
	Headers []Named `json:"headers,omitempty"` // the name "host" stands for the request's host, with its port
	Baggage []Named `json:"baggage,omitempty"` // members of W3C Baggage, decoded
	Cookies []Named `json:"cookies,omitempty"`
	Query   []Named `json:"query,omitempty"` // decoded
	// Path is decoded and has no query. "/api" and "/api/" match /api and all paths below it.
	Path    string   `json:"path,omitempty"`
	Methods []string `json:"methods,omitempty"` // a request matches if it has one of them
}

// Named is a value with a name that a request must have. If the request repeats it, one of its values must match. The
// name of a header may be in any case.
type Named struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// IsZero reports whether s matches everything.
func (s *Spec) IsZero() bool { return !s.Marks() && s.Path == "" && len(s.Methods) == 0 }

// Marks reports whether s selects requests by what their sender adds to them: a header, or a part of one or of the
// query.
func (s *Spec) Marks() bool {
	return len(s.Headers) > 0 || len(s.Baggage) > 0 || len(s.Cookies) > 0 || len(s.Query) > 0
}

// Added returns the headers that make any request match the headers and the baggage of s; nil if it has expressions, or
// names the host.
func (s *Spec) Added() (headers []Named) {
	for in, named := range [...][]Named{inHeader: s.Headers, inBaggage: s.Baggage} {
		for _, n := range named {
			if strings.HasPrefix(n.Value, regexpPrefix) || strings.EqualFold(n.Name, "host") {
				return nil
			}
			if part(in) == inBaggage {
				n = Named{Name: "baggage", Value: n.Name + "=" + url.PathEscape(n.Value)}
			}
			headers = append(headers, n)
		}
	}
	return headers
}

// Match matches requests. The zero Match matches every request, and connections that are not HTTP. It is immutable and
// safe for concurrent use.
type Match struct {
	fields  []field
	path    *text
	methods []string
}

// text is a value, or an expression for it.
type text struct {
	exact string
	re    *regexp.Regexp // nil: exact
}

// New compiles a Spec. Its error names the wrong field.
func New(s Spec) (*Match, error) {
	m := new(Match)
	parts := [...][]Named{inHeader: s.Headers, inBaggage: s.Baggage, inCookie: s.Cookies, inQuery: s.Query}
	for in, named := range parts {
		for _, n := range named {
			f, err := newField(part(in), n)
			if err != nil {
				return nil, fmt.Errorf("%s %q: %w", part(in), n.Name, err)
			}
			m.fields = append(m.fields, f)
		}
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

// ParseNamed reads a value as it is written on a command line: "name=value", or "name=~expression".
func ParseNamed(s string) (Named, error) {
	name, value, found := strings.Cut(s, "=")
	if !found || name == "" {
		return Named{}, fmt.Errorf("%q is not name=value, nor name=~expression", s)
	}
	if strings.HasPrefix(value, "~") {
		value = "=" + value
	}
	return Named{Name: name, Value: value}, nil
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
func (m *Match) All() bool { return len(m.fields) == 0 && m.path == nil && len(m.methods) == 0 }

// Matches reports whether m matches the request, which a server has read: its headers' names are canonical.
func (m *Match) Matches(r *http.Request) bool {
	if len(m.methods) > 0 && !slices.Contains(m.methods, r.Method) {
		return false
	}
	if m.path != nil && !m.path.matchesPath(r.URL.Path) {
		return false
	}
	for i := range m.fields {
		if !m.fields[i].matches(r) {
			return false
		}
	}
	return true
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

// String describes m for people: "x-user=me, baggage user=me, path /api, GET or POST"; "everything".
func (m *Match) String() string {
	if m.All() {
		return "everything"
	}
	var parts []string
	for i := range m.fields {
		f := &m.fields[i]
		sign := "="
		if f.re != nil {
			sign = regexpPrefix
		}
		parts = append(parts, f.String()+sign+f.exact)
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
