package api

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestCleanRemovesWhatATerminalInterprets(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"plain text", "größe ✓ 日本\n\tx", "größe ✓ 日本\n\tx"},
		{"a title in an OSC", "pod\x1b]0;pwned\x07 ready", "pod]0;pwned ready"},
		{"a carriage return", "error\rConnected", "errorConnected"},
		{"C1 and DEL", "a\u009b31mb\u0085c\x7f", "a31mbc"},
		{"bidi overrides", "a\u202egnp.exe\u2066\u200f", "agnp.exe"},
		{"line separators", "a\u2028b\u2029", "ab"},
		{"invalid UTF-8", "a\x9b31m\xff", "a\ufffd31m\ufffd"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Clean(tt.in); got != tt.want {
				t.Fatalf("Clean(%q) = %q, want %q", tt.in, got, tt.want)
			}
		})
	}
}

func TestShellQuoteMakesOneWord(t *testing.T) {
	for in, want := range map[string]string{
		"dev@example.com": "dev@example.com",
		"":                "''",
		"o'dev":           `'o'\''dev'`,
		"a;reboot":        "'a;reboot'",
		"$(id)\n`id`":     "'$(id)`id`'",
		"a\x1bb":          "ab",
	} {
		if got := ShellQuote(in); got != want {
			t.Errorf("ShellQuote(%q) = %s, want %s", in, got, want)
		}
	}
}

func FuzzClean(f *testing.F) {
	f.Add("a\x1b]0;x\x07\r\u202e\x9b")
	f.Fuzz(func(t *testing.T, s string) {
		c := Clean(s)
		if !utf8.ValidString(c) || strings.ContainsAny(c, "\x1b\r\x7f\u009b\u202e") || Clean(c) != c {
			t.Fatalf("%q became %q", s, c)
		}
	})
}

func TestSomeNamesTheFirstItems(t *testing.T) {
	for most, want := range map[int]string{1: "1 and 2 more", 2: "1, 2 and 1 more", 3: "1, 2, 3", 4: "1, 2, 3"} {
		if got := Some([]int{1, 2, 3}, most); got != want {
			t.Errorf("%d: %q, want %q", most, got, want)
		}
	}
	if got := Some([]string(nil), 3); got != "" {
		t.Errorf("of nothing: %q", got)
	}
}

func TestCount(t *testing.T) {
	if got := Count(0, "pod") + ", " + Count(1, "pod") + ", " + Count(2, "pod"); got != "0 pods, 1 pod, 2 pods" {
		t.Error(got)
	}
}
