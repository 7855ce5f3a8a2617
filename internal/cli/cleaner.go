package cli

import (
	"io"
	"sync"
	"unicode/utf8"

	"kubevpn/internal/api"
)

// cleaner removes escape sequences and other control characters from its output, because much of the output comes from
// the cluster. All output of the commands passes through a cleaner. It is safe for concurrent use.
type cleaner struct {
	w io.Writer

	mu   sync.Mutex
	rest []byte // the start of a character that the next Write completes
}

func (c *cleaner) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := append(c.rest, p...)
	whole := len(text)
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if last := text[len(text)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				whole -= n
			}
			break
		}
	}
	c.rest = append([]byte(nil), text[whole:]...)
	if _, err := io.WriteString(c.w, api.Clean(string(text[:whole]))); err != nil {
		return 0, err
	}
	return len(p), nil
}
