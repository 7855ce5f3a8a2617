package api

import (
	"strings"
	"unicode"
)

// Clean makes text of unknown origin safe to print on a terminal. It removes control characters except newline and tab,
// among them ESC, carriage return, DEL and C1, and format characters that reorder or hide text, such as U+202E. It
// replaces each byte that is not UTF-8 by U+FFFD.
func Clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n', r == '\t':
			return r
		case unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp):
			return -1
		}
		return r
	}, s)
}

// OneLine replaces each run of white space, line ends among them, by one space.
func OneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// ShellQuote makes s one word of a shell command that a user may copy. It removes what Clean removes, and newlines and
// tabs.
func ShellQuote(s string) string {
	s = strings.NewReplacer("\n", "", "\t", "").Replace(Clean(s))
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("@%+=:,./-_", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
