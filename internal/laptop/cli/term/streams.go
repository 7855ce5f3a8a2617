package term

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

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

// Terminal returns the terminal for a question, or nil. The answer comes from In, which must be a terminal too. The
// caller calls done after the answer.
func (s *Streams) Terminal() (_ io.Writer, done func()) {
	if File(s.In) == nil {
		return nil, nil
	}
	if File(s.Errout) != nil {
		return s.Errout, func() {}
	}
	f, err := os.OpenFile("/dev/tty", os.O_WRONLY, 0)
	if err != nil {
		return nil, nil // the user would not see the question
	}
	return &Cleaner{W: f}, func() { f.Close() }
}

// Confirm writes a question to the terminal, and reports whether the user answers it with yes. It returns the error of
// ctx if that ends first.
func (s *Streams) Confirm(ctx context.Context, terminal io.Writer, question string) (bool, error) {
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
