package lab

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"
)

// compiled reads the output of `go list` and `go build -v`: a line for each downloaded module, a line for each package
// whose compilation begins, and errors. It is safe for concurrent use.
type compiled struct {
	mu    sync.Mutex
	began time.Time
	total int // packages to compile; 0: unknown
	count int
	loads int    // modules that were downloaded
	line  []byte // not ended
	other []string
}

// importPath matches a line of `go build -v`.
var importPath = regexp.MustCompile(`^[\w.~-]+(/[\w.~+-]+)*$`)

// begin sets how many packages go build will compile.
func (c *compiled) begin(total int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.began, c.total = time.Now(), total
}

func (c *compiled) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.line = append(c.line, p...)
	for {
		line, after, found := bytes.Cut(c.line, []byte("\n"))
		if !found {
			return len(p), nil
		}
		switch {
		case importPath.Match(line):
			c.count++
		case bytes.HasPrefix(line, []byte("go: downloading ")):
			c.loads++
		default:
			c.other = append(c.other, string(line))
		}
		c.line = after
	}
}

// status reports the progress of the build. The remaining time is an estimate, because packages take different times.
func (c *compiled) status() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.count == 0 && c.loads > 0:
		return fmt.Sprintf("downloaded %d modules", c.loads)
	case c.total == 0 || c.count == 0:
		return ""
	case c.count >= c.total:
		return "linking"
	}
	out := fmt.Sprintf("%d of %d packages", c.count, c.total)
	if took := time.Since(c.began); c.count*20 >= c.total {
		left := took * time.Duration(c.total-c.count) / time.Duration(c.count)
		out += fmt.Sprintf(", about %v left", max(left.Round(10*time.Second), 10*time.Second))
	}
	return out
}

// rest returns the lines that name no package: errors.
func (c *compiled) rest() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.TrimSpace(strings.Join(append(c.other, string(c.line)), "\n"))
}
