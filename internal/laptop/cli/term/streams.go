package term

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"kubevpn/internal/api"

	"golang.org/x/term"
)

// Streams are the input and the outputs of a command.
type Streams struct {
	In     io.Reader
	Out    io.Writer // for results; a *Cleaner, like Errout
	Errout io.Writer // for progress, questions, warnings and errors

	Dumb      bool // terminals understand no escape sequences
	Verbosity int  // -v: from 1 on, Errout also has a log
	Quiet     bool // -q
	Events    int  // a file descriptor for all events, as lines of JSON; 0: none
}

// Note prints a line on Errout, unless Quiet. It is safe for concurrent use.
func (s *Streams) Note(format string, args ...any) {
	if !s.Quiet {
		fmt.Fprintf(s.Errout, format+"\n", args...)
	}
}

// Exact returns the output for data. Only a terminal gets it without control characters.
func (s *Streams) Exact() io.Writer {
	if c, ok := s.Out.(*Cleaner); ok && File(s.Out) == nil {
		return c.W
	}
	return s.Out
}

// File returns the terminal behind a reader or a writer, or nil.
func File(w any) *os.File {
	if c, ok := w.(*Cleaner); ok {
		w = c.W
	}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return f
	}
	return nil
}

// ErrNoTerminal is the error of Confirm if the user would not see the question, or cannot answer.
var ErrNoTerminal = errors.New("there is no terminal")

// Confirm asks the user on the terminal, and reports whether the answer is yes. The answer comes from In, which must be
// a terminal too. Confirm calls quiet before it writes. It returns the error of ctx if that ends first.
func (s *Streams) Confirm(ctx context.Context, quiet func(), question string) (bool, error) {
	terminal := s.Errout
	if File(s.In) == nil {
		return false, ErrNoTerminal
	}
	if File(s.Errout) == nil {
		f, err := os.OpenFile("/dev/tty", os.O_WRONLY, 0)
		if err != nil {
			return false, ErrNoTerminal
		}
		defer f.Close()
		terminal = &Cleaner{W: f}
	}
	quiet()
	fmt.Fprint(terminal, question)
	line := make(chan string, 1)
	go func() { line <- readLine(s.In) }() // nothing interrupts the read: it ends with the process
	select {
	case answer := <-line:
		answer = strings.ToLower(strings.TrimSpace(answer))
		return answer == "y" || answer == "yes", nil
	case <-ctx.Done():
		fmt.Fprintln(terminal)
		return false, ctx.Err()
	}
}

// readLine reads one line and nothing after it: another program may read the rest.
func readLine(r io.Reader) string {
	var line strings.Builder
	for b := make([]byte, 1); ; {
		n, err := r.Read(b)
		if n > 0 && b[0] == '\n' || err != nil {
			return line.String()
		}
		line.Write(b[:n])
	}
}

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
