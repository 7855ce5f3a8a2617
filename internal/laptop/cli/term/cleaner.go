package term

import (
	"io"
	"slices"
	"sync"

	"kubevpn/internal/api"
)

// Cleaner removes escape sequences and other control characters from what it writes to W, because much of the output
// comes from the cluster. All output of the commands passes through a Cleaner. It is safe for concurrent use.
type Cleaner struct {
	W io.Writer

	mu   sync.Mutex
	rest []byte // the start of a character that the next Write completes
}

// Write writes p without control characters. It keeps an incomplete last character for the next Write.
func (c *Cleaner) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := append(c.rest, p...)
	whole := api.WholeRunes(text)
	c.rest = slices.Clone(text[len(whole):])
	if _, err := io.WriteString(c.W, api.Clean(string(whole))); err != nil {
		return 0, err
	}
	return len(p), nil
}
