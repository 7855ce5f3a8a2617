package shadow

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// step is one step of a path into a JSON value.
type step struct {
	name  string // of a member; not of an element
	index int    // of an element; -1: of a member
}

func member(name string) step    { return step{name, -1} }
func element(index int) step     { return step{"", index} }
func (s step) isMember() bool    { return s.index < 0 }
func plainName(s string) bool    { return s != "" && strings.Trim(s, nameChars) == "" }
func isHeaderName(s string) bool { return s != "" && strings.Trim(s, nameChars+".!#$%&'*+^`|~") == "" }

const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

// pathText returns a path with all elements of a list as one: $.items[*].id.
func pathText(path []step) string {
	var b strings.Builder
	b.WriteByte('$')
	for _, s := range path {
		switch {
		case !s.isMember():
			b.WriteString("[*]")
		case plainName(s.name):
			b.WriteString("." + s.name)
		default:
			quoted, err := json.Marshal(clip(s.name))
			if err != nil {
				panic(err) // a string
			}
			b.WriteString("[" + string(quoted) + "]")
		}
	}
	return b.String()
}

// pattern is one step of an ignored path.
type pattern struct {
	step
	any  bool // every member or element
	deep bool // the rest may begin at any depth
}

// Ignored are the places that the user does not want to compare. The zero value ignores nothing.
type Ignored struct {
	paths   [][]pattern
	headers []string // canonical
}

// maxPattern bounds the length of an ignored path, because matching .. takes time.
const maxPattern = 256

// Parse adds the name of a header, or a path into JSON bodies such as $.a.b, $.items[*].id, $["a b"] and $..id. A path
// ignores all below it.
func (i *Ignored) Parse(text string) error {
	if !strings.HasPrefix(text, "$") {
		if !isHeaderName(text) {
			return fmt.Errorf("%q is neither a path such as $.items[*].id nor the name of a header", text)
		}
		i.headers = append(i.headers, http.CanonicalHeaderKey(text))
		return nil
	}
	if len(text) > maxPattern {
		return fmt.Errorf("the path is longer than %d bytes", maxPattern)
	}
	var path []pattern
	for rest := text[1:]; rest != ""; {
		p, after, err := parseStep(rest)
		if err != nil {
			return fmt.Errorf("%q: %w", text, err)
		}
		path, rest = append(path, p), after
	}
	i.paths = append(i.paths, path)
	return nil
}

// parseStep parses the first step of a path: .name, ..name, .*, [*], [0], ["name"] or ['name'].
func parseStep(text string) (p pattern, rest string, err error) {
	if deep, found := strings.CutPrefix(text, ".."); found {
		if text = "." + deep; strings.HasPrefix(deep, "[") {
			text = deep
		}
		p.deep = true
	}
	switch {
	case strings.HasPrefix(text, "["):
		return p.parseBracket(text)
	case !strings.HasPrefix(text, "."):
		return p, "", fmt.Errorf("%q does not begin with . or [", text)
	}
	end := strings.IndexAny(text[1:], ".[") + 1
	if end == 0 {
		end = len(text)
	}
	if name := text[1:end]; name == "*" {
		p.any = true
	} else if p.step = member(name); name == "" {
		return p, "", fmt.Errorf("a name is missing at %q", text)
	}
	return p, text[end:], nil
}

func (p pattern) parseBracket(text string) (_ pattern, rest string, err error) {
	if rest, found := strings.CutPrefix(text, "[*]"); found {
		p.any = true
		return p, rest, nil
	}
	for _, quote := range []string{`"`, `'`} {
		quoted, found := strings.CutPrefix(text, "["+quote)
		if !found {
			continue
		}
		name, rest, found := strings.Cut(quoted, quote+"]")
		if !found {
			return p, "", fmt.Errorf("%q has no end", text)
		}
		p.step = member(name)
		return p, rest, nil
	}
	number, rest, found := strings.Cut(text[1:], "]")
	index, err := strconv.ParseUint(number, 10, 31)
	if !found || err != nil {
		return p, "", fmt.Errorf("%q is no index: write [*], [0] or [\"name\"]", text)
	}
	p.step = element(int(index))
	return p, rest, nil
}

// header reports whether a header is ignored.
func (i *Ignored) header(name string) bool { return slices.Contains(i.headers, name) }

// path reports whether a path, or one above it, is ignored.
func (i *Ignored) path(path []step) bool {
	return slices.ContainsFunc(i.paths, func(p []pattern) bool { return begins(path, p) })
}

// begins reports whether the first steps of the path match the pattern.
func begins(path []step, p []pattern) bool {
	switch {
	case len(p) == 0:
		return true
	case len(path) == 0:
		return false
	case (p[0].any || p[0].step == path[0]) && begins(path[1:], p[1:]):
		return true
	}
	return p[0].deep && begins(path[1:], p)
}
