package diff

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// step is one step of a path into a JSON value: the name of a member (string) or the index of an element (int).
type step any

var plainName = regexp.MustCompile(`^[\w-]+$`)

// pathText returns a path with all elements of a list as one: $.items[*].id.
func pathText(path []step) string {
	var b strings.Builder
	b.WriteByte('$')
	for _, s := range path {
		name, isMember := s.(string)
		switch {
		case !isMember:
			b.WriteString("[*]")
		case plainName.MatchString(name):
			b.WriteString("." + name)
		default:
			quoted, _ := json.Marshal(cut(name, maxText)) // no error: it is a string
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
		if !httpguts.ValidHeaderFieldName(text) {
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
		m := firstStep.FindStringSubmatch(rest)
		if m == nil {
			return fmt.Errorf("%q: %q is no name and is no index: write .name, ..name, [*], [0] or [\"name\"]", text,
				rest)
		}
		p := pattern{deep: strings.HasPrefix(rest, "..")}
		switch step := strings.TrimLeft(m[0], "."); {
		case step == "*", step == "[*]":
			p.any = true
		case m[2] != "":
			index, err := strconv.ParseUint(m[2], 10, 31)
			if err != nil {
				return fmt.Errorf("%q: the index %s is too large", text, m[2])
			}
			p.step = int(index)
		default:
			p.step = m[1] + m[3] + m[4]
		}
		path, rest = append(path, p), rest[len(m[0]):]
	}
	i.paths = append(i.paths, path)
	return nil
}

// firstStep matches .name, ..name, .* and, perhaps after .., [*], [0], ["name"] and ['name'].
var firstStep = regexp.MustCompile(`(?s)^(?:\.\.?([^.[]+)|(?:\.\.)?\[(?:\*|([0-9]+)|"(.*?)"|'(.*?)')\])`)

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
