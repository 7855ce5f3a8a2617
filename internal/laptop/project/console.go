package project

import (
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"kubevpn/internal/api"
)

// Output is where the output of the entries goes.
type Output struct {
	W io.Writer // nil: nowhere
	// Terminal, unless nil, is W as a terminal that shows colours.
	Terminal *os.File
}

// colours of names, as SGR parameters: https://man7.org/linux/man-pages/man4/console_codes.4.html
var colours = [...]int{36, 33, 32, 35, 34, 96, 93, 92, 95, 94}

// console prints lines behind the name of their entry. It is safe for concurrent use.
type console struct {
	mu      sync.Mutex
	out     Output
	names   []string // a name's index chooses its colour
	longest int
	tees    []func(name, text string)
}

func newConsole(out Output) *console { return &console{out: out} }

// width makes room for the names of entries.
func (c *console) width(entries []Entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range entries {
		c.longest = max(c.longest, len(e.Name))
		if !slices.Contains(c.names, e.Name) {
			c.names = append(c.names, e.Name)
		}
	}
}

// tee also gives each line to tell, until the function that it returns is called. tell may be nil.
func (c *console) tee(tell func(name, text string)) (stop func()) {
	if tell == nil {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tees = append(c.tees, tell)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.tees = c.tees[:len(c.tees)-1] // Set.changing admits one at a time
	}
}

func (c *console) print(name, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	text = api.Clean(text)
	for _, tell := range c.tees {
		tell(name, text)
	}
	c.out.line(max(0, slices.Index(c.names, name)), c.longest, name, text)
}

// Line prints one line of a Set in another process.
func (o Output) Line(name, text string) { o.line(0, len(name), name, text) }

func (o Output) line(n, width int, name, text string) {
	switch {
	case o.W == nil:
	case o.Terminal != nil:
		fmt.Fprintf(o.Terminal, "\x1b[%dm%-*s |\x1b[0m %s\n", colours[n%len(colours)], width, name, text)
	default:
		fmt.Fprintf(o.W, "%-*s | %s\n", width, name, text)
	}
}
