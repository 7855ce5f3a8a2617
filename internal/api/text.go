package api

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
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

// WholeRunes returns b without the beginning of a character at its end.
func WholeRunes(b []byte) []byte {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if last := b[len(b)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				return b[:len(b)-n]
			}
			break
		}
	}
	return b
}

// ParseAddrs parses comma-separated IP addresses. It converts IPv4-mapped ones to IPv4.
func ParseAddrs(text string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	for word := range strings.SplitSeq(text, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		addr, err := netip.ParseAddr(word)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, addr.Unmap())
	}
	return addrs, nil
}

// OneLine replaces each run of white space, line ends among them, by one space.
func OneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// CleanLine makes text of unknown origin one line that is safe to print on a terminal.
func CleanLine(s string) string { return OneLine(Clean(s)) }

// Count returns text like "1 pod" or "2 pods".
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Find returns the first item of a list that is wanted, or nil.
func Find[T any](list []T, wanted func(T) bool) *T {
	if n := slices.IndexFunc(list, wanted); n >= 0 {
		return &list[n]
	}
	return nil
}

// Texts returns the texts of the items of a list.
func Texts[T any](list []T, text func(T) string) []string {
	var texts []string
	for _, item := range list {
		texts = append(texts, text(item))
	}
	return texts
}

// Within reports whether a path is dir or below it. Both are clean and separated by slashes.
func Within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// Join returns text like "a, b".
func Join[T any](list []T) string {
	return strings.Join(Texts(list, func(item T) string { return fmt.Sprint(item) }), ", ")
}

// Some returns text like "a, b and 3 more", which names at most so many items of a list.
func Some[T any](list []T, most int) string {
	text := Join(list[:min(len(list), most)])
	if more := len(list) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

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
