package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"golang.org/x/term"

	"kubevpn/internal/api"
)

// followDaemon calls on with each line that the daemon answers to a GET request, until the daemon or ctx ends it.
// Ctrl-C is a regular end. Without a daemon, it calls on once with the zero T and errNoDaemon.
func followDaemon[T any](ctx context.Context, a *app, path string, on func(line T, err error) error) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	switch {
	case errors.Is(err, errNoDaemon):
		fmt.Fprintln(a.errout, "not connected")
		var none T
		return on(none, err)
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	defer resp.Body.Close()
	err = readLines(ctx, c, resp.Body, func(line T) error { return on(line, nil) })
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// printLine is print, but followed objects are one line of JSON each.
func (f *format) printLine(w io.Writer, followed bool, object any) error {
	switch {
	case followed && f.value == "json":
		return json.NewEncoder(w).Encode(object)
	case followed && f.value == "yaml":
		fmt.Fprintln(w, "---")
	}
	return f.print(w, object)
}

// screen shows texts, each of which replaces the previous one.
type screen struct {
	out      io.Writer
	terminal *os.File // nil: each text follows the previous one
}

// newScreen returns a screen on the terminal, if replace is set and the output is one.
func (a *app) newScreen(replace bool) *screen {
	s := &screen{out: a.out}
	if replace && a.getenv("TERM") != "dumb" {
		s.terminal = terminalOf(a.out)
	}
	return s
}

// draw shows the output of show, cut to the size of the terminal.
func (s *screen) draw(show func(io.Writer) error) error {
	if s.terminal == nil {
		return show(s.out)
	}
	var text strings.Builder
	if err := show(&text); err != nil {
		return err
	}
	width, height, err := term.GetSize(int(s.terminal.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		width, height = 80, 24
	}
	_, err = io.WriteString(s.terminal, frame(text.String(), width, height))
	return err
}

// frame returns the output that replaces the content of a terminal of this size with the text.
func frame(text string, width, height int) string {
	const home, restOfLine, restOfScreen = "\x1b[H", "\x1b[K", "\x1b[J"
	lines := strings.Split(strings.TrimRight(api.Clean(text), "\n"), "\n")
	if room := max(height-1, 1); len(lines) > room {
		lines = append(lines[:room-1:room-1], lines[len(lines)-1])
	}
	var b strings.Builder
	b.WriteString(home)
	for _, line := range lines {
		if cells := []rune(line); len(cells) > width {
			line = string(cells[:width])
		}
		b.WriteString(line + restOfLine + "\r\n")
	}
	return b.String() + restOfScreen
}
