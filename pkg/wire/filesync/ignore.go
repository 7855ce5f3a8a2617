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

	"kubevpn/pkg/wire/remotefs"
)

// defaultIgnore lists the private files of Git and of editors, and those of a remotefs.Server.
const defaultIgnore = `
.git
*~
.*.sw[a-p]
.*.swx
.#*
\#*#
.DS_Store
` + remotefs.AsidePrefix + `*
`

// ignoreFiles are the names of the ignore file. The first one that exists counts.
var ignoreFiles = [...]string{".kubevpnignore", ".gitignore"}

// ignore holds patterns of gitignore(5). doublestar matches them; this file adds Git's rules. A .dockerignore matcher
// has others: its patterns start at the top, cannot mean directories only, and a pattern that matches a directory
// overrules later ones.
type ignore []rule

type rule struct {
	pattern  string // doublestar's
	literal  bool   // it has no special characters
	anywhere bool   // it applies to the last element of a path
	onlyDir  bool
	negated  bool
}

// parseIgnore reads patterns, one a line. As Git does, it leaves out those that are not valid; the error names them.
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
		p = before + "/**/*" // its contents, not the directory itself
	}
	r.literal = !strings.ContainsAny(p, `*?[\`)
	r.pattern = p
	if !r.literal {
		r.pattern = escapeBraces.Replace(p)
		if !doublestar.ValidatePattern(r.pattern) {
			return rule{}, false, doublestar.ErrBadPattern
		}
	}
	return r, true, nil
}

// trimSpaces removes trailing spaces that are not quoted.
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

// escapeBraces quotes braces, which mean alternatives to doublestar and nothing to Git.
var escapeBraces = strings.NewReplacer(`\\`, `\\`, `\{`, `\{`, `\}`, `\}`, `{`, `\{`, `}`, `\}`)

// ignores reports whether the last rule that matches a path ignores it. The caller does not ask about paths below an
// ignored directory.
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

// above reports whether a path, or a directory above it, is ignored.
func (ig ignore) above(p string, isDir bool) bool {
	for ; p != "."; p, isDir = path.Dir(p), true {
		if ig.ignores(p, isDir) {
			return true
		}
	}
	return false
}

// readIgnore returns the rules for a directory: the default ones, then those of its ignore file. They are valid even if
// there is an error, which is about the file.
func readIgnore(root string) (ignore, error) {
	rules, err := parseIgnore(defaultIgnore)
	if err != nil {
		return nil, err
	}
	for _, name := range ignoreFiles {
		b, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return rules, err
		}
		fromFile, err := parseIgnore(string(b))
		if err != nil {
			err = fmt.Errorf("%s: %w", name, err)
		}
		return append(rules, fromFile...), err
	}
	return rules, nil
}
