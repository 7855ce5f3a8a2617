package httpmatch

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// maxGot limits the text of Difference.Got, in bytes.
const maxGot = 128

// Difference is a part of a match that a request does not satisfy.
type Difference struct {
	Part   string `json:"part"`             // "header x-user", "baggage user", "path", "method"
	Want   string `json:"want"`             // as the match describes it
	Got    string `json:"got,omitempty"`    // of the request; the start of a long text
	Absent bool   `json:"absent,omitempty"` // the request has no value of that name
}

// String returns text like `header x-user is absent` or `header x-user is "you", not "me"`.
func (d Difference) String() string {
	switch {
	case d.Absent:
		return d.Part + " is absent"
	case d.Got == "":
		return fmt.Sprintf("%s is not %q", d.Part, d.Want)
	}
	return fmt.Sprintf("%s is %q, not %q", d.Part, d.Got, d.Want)
}

// Differences returns the parts of m that the request does not satisfy: none if Matches returns true.
func (m *Match) Differences(r *http.Request) (all []Difference) {
	if len(m.methods) > 0 && !slices.Contains(m.methods, r.Method) {
		all = append(all, Difference{Part: "method", Want: strings.Join(m.methods, " or "), Got: start(r.Method)})
	}
	if m.path != nil && !m.path.matchesPath(r.URL.Path) {
		all = append(all, Difference{Part: "path", Want: m.path.String(), Got: start(r.URL.Path)})
	}
	for i := range m.fields {
		f := &m.fields[i]
		if f.matches(r) {
			continue
		}
		name := f.String()
		if f.in == inHeader {
			name = "header " + name
		}
		values := slices.Collect(f.values(r))
		all = append(all, Difference{Part: name, Want: f.text.String(),
			Got: start(strings.Join(values, ", ")), Absent: len(values) == 0})
	}
	return all
}

// String returns a value as a Spec has it.
func (t text) String() string {
	if t.re != nil {
		return regexpPrefix + t.exact
	}
	return t.exact
}

func start(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxGot)], "") }
