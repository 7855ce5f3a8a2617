package filesync

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
)

// defaultIgnore is what Git and editors keep for themselves, and what a Target writes before it renames.
const defaultIgnore = `
.git
*~
.*.sw[a-p]
.*.swx
.#*
\#*#
.DS_Store
` + tempPrefix + `*
`

// ignoreFiles are the ones of which the first that there is counts.
var ignoreFiles = [...]string{".kubevpnignore", ".gitignore"}

// ignore judges paths by patterns of gitignore(5). The matching is doublestar's; this is what Git has around it. That is why it is not
// .dockerignore's matcher: there, a pattern begins at the top, has no way to mean only directories, and one that
// matches a directory also decides about what a later one said of the paths below it.
type ignore []rule

type rule struct {
	pattern  string // doublestar's
	literal  bool   // there is nothing in it to match with
	anywhere bool   // it is for the last element of a path
	onlyDir  bool
	negated  bool
}

// parseIgnore reads lines. A bad one is left out, as Git does, and named.
func parseIgnore(text string) (ignore, error) {
	var rules ignore
	var bad []error
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		r, ok, err := parseRule(line)
		if err != nil {
			bad = append(bad, fmt.Errorf("ignore pattern %q: %w", line, err))
		}
		if ok && err == nil {
			rules = append(rules, r)
		}
	}
	return rules, errors.Join(bad...)
}

func parseRule(line string) (rule, bool, error) {
	p := trimSpaces(line)
	if p == "" || p[0] == '#' {
		return rule{}, false, nil
	}
	var r rule
	if p[0] == '!' {
		r.negated, p = true, p[1:]
	}
	if before, found := strings.CutSuffix(p, "/"); found {
		r.onlyDir, p = true, before
	}
	if p == "" {
		return rule{}, false, nil
	}
	r.anywhere = !strings.Contains(p, "/")
	p = strings.TrimPrefix(p, "/")
	if before, found := strings.CutSuffix(p, "/**"); found {
		p = before + "/**/*" // what is in it, not itself
	}
	r.literal = !strings.ContainsAny(p, `*?[\`)
	r.pattern = p
	if !r.literal {
		r.pattern = escapeBraces(p)
		if !doublestar.ValidatePattern(r.pattern) {
			return rule{}, false, doublestar.ErrBadPattern
		}
	}
	return r, true, nil
}

// trimSpaces removes the spaces at the end that are not quoted.
func trimSpaces(s string) string {
	for strings.HasSuffix(s, " ") {
		backslashes := len(s) - 1 - len(strings.TrimRight(s[:len(s)-1], `\`))
		if backslashes%2 == 1 {
			break
		}
		s = s[:len(s)-1]
	}
	return s
}

// escapeBraces quotes what means alternatives to doublestar, and nothing to Git.
func escapeBraces(p string) string {
	var b strings.Builder
	for i := 0; i < len(p); i++ {
		switch c := p[i]; {
		case c == '\\' && i+1 < len(p):
			b.WriteByte(c)
			i++
			b.WriteByte(p[i])
		case c == '{' || c == '}':
			b.WriteByte('\\')
			b.WriteByte(c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// ignores reports whether the last rule that matches says so. What is below an ignored directory is not asked about.
func (ig ignore) ignores(p string, isDir bool) bool {
	base := path.Base(p)
	for i := len(ig) - 1; i >= 0; i-- {
		r := &ig[i]
		if r.onlyDir && !isDir {
			continue
		}
		subject := p
		if r.anywhere {
			subject = base
		}
		if r.literal && subject == r.pattern || !r.literal && doublestar.MatchUnvalidated(r.pattern, subject) {
			return !r.negated
		}
	}
	return false
}

// above reports whether the path is ignored, or a directory that it is in.
func (ig ignore) above(p string, isDir bool) bool {
	for i := range len(p) {
		if p[i] == '/' && ig.ignores(p[:i], true) {
			return true
		}
	}
	return ig.ignores(p, isDir)
}

// readIgnore gives the rules for a directory: the default ones, those of its ignore file, and the given ones, which have the
// last word. The error is about the file: the rules are to be used all the same.
func readIgnore(root string, given ignore) (ignore, error) {
	rules, err := parseIgnore(defaultIgnore)
	if err != nil {
		return nil, err
	}
	for _, name := range ignoreFiles {
		b, readErr := os.ReadFile(filepath.Join(root, name))
		if errors.Is(readErr, fs.ErrNotExist) {
			continue
		}
		if readErr != nil {
			err = readErr
			break
		}
		fromFile, badLines := parseIgnore(string(b))
		rules = append(rules, fromFile...)
		if badLines != nil {
			err = fmt.Errorf("%s: %w", name, badLines)
		}
		break
	}
	return append(rules, given...), err
}
