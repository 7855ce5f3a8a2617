package term

import (
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"kubevpn/internal/api"
)

// Screen shows texts, each of which replaces the previous one.
type Screen struct {
	out      io.Writer
	terminal *os.File // nil: each text follows the previous one
}

// Screen returns a screen on the terminal, if replace is set and Out is one.
func (s *Streams) Screen(replace bool) *Screen {
	screen := &Screen{out: s.Out}
	if replace && !s.Dumb {
		screen.terminal = File(s.Out)
	}
	return screen
}

// Draw shows the output of show, cut to the size of the terminal.
func (s *Screen) Draw(show func(io.Writer) error) error {
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
