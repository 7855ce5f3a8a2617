package cli

import (
	"io"
	"slices"
	"sync"

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
	whole := api.WholeRunes(text)
	c.rest = slices.Clone(text[len(whole):])
	if _, err := io.WriteString(c.w, api.Clean(string(whole))); err != nil {
		return 0, err
	}
	return len(p), nil
}
