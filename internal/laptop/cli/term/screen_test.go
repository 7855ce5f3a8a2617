package term

import (
	"strings"
	"testing"
)

func TestFrameFitsTheTerminalAndHasNoOtherEscapes(t *testing.T) {
	got := frame("head\nfirst row\nsecond row\nevil\x1b[2Jrow\nsum\n", 6, 4)
	if want := "\x1b[Hhead\x1b[K\r\nfirst \x1b[K\r\nsum\x1b[K\r\n\x1b[J"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := frame("evil\x1b[2Jrow\n", 80, 24); strings.Contains(got, "\x1b[2J") {
		t.Errorf("%q", got)
	}
}
