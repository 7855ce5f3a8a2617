//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/vt"
	"github.com/creack/pty"
)

const (
	columns, rows = 100, 24
	// The whole text in one screen: no line wraps and none scrolls.
	wholeColumns, wholeRows = 2000, 300

	// prompt is a green dollar. Before it, the shell reports the exit code of the last command as terminals expect it
	// (OSC 133), which shows nothing.
	prompt      = `\[\e]133;D;$?\a\e[1;38;2;126;231;135m\]$\[\e[0m\] `
	promptWidth = 2

	limit = time.Minute // for one command

	// The picture shows real times, apart from these.
	shortest = 50 * time.Millisecond // a shorter frame becomes part of the next one
	longest  = time.Second
	enter    = 250 * time.Millisecond // between a command and its first output
	reading  = 600 * time.Millisecond // between the last output and the next command
	atEnd    = 2500 * time.Millisecond
	keys     = 3 // that a frame adds to a command
)

// recording is what a terminal showed.
type recording struct {
	frames []frame
	text   string // all of it in the end, with lines that are not wrapped
}

// frame is one screen, and how long the picture shows it.
type frame struct {
	rows             []string // as SVG, below each other
	cursorX, cursorY int
	lasts            time.Duration
}

// terminal is a terminal in which a shell runs.
type terminal struct {
	tty           *os.File
	screen, whole *vt.Emulator
	exited        string // what the shell said about the last command; empty while it runs
	frames        []frame
	since         time.Time // start of the last frame
}

// recordShell types the commands into a shell with the prompt of this package, and records what its terminal shows.
func recordShell(shell *exec.Cmd, steps []step) (*recording, error) {
	tty, err := pty.StartWithSize(shell, &pty.Winsize{Cols: columns, Rows: rows})
	if err != nil {
		return nil, err
	}
	t := &terminal{tty: tty, screen: vt.NewEmulator(columns, rows), whole: vt.NewEmulator(wholeColumns, wholeRows)}
	t.screen.RegisterOscHandler(133, func(data []byte) bool {
		t.exited = string(data)
		return true
	})
	err = t.play(steps)
	tty.Close() // the shell gets a SIGHUP
	_ = shell.Wait()
	if err != nil {
		return nil, fmt.Errorf("%w; the terminal shows:\n%s", err, t.text())
	}
	return &recording{t.frames, t.text()}, nil
}

func (t *terminal) play(steps []step) error {
	if err := t.read(0, t.prompts); err != nil {
		return fmt.Errorf("no prompt: %w", err)
	}
	t.frames = t.frames[len(t.frames)-1:]
	for _, s := range steps {
		before := len(t.text())
		if err := t.run(s.command); err != nil {
			return fmt.Errorf("%s: %w", s.command, err)
		}
		if output := t.text()[before:]; t.exited != "133;D;0" || !strings.Contains(output, s.want) {
			return fmt.Errorf("%s: exit code %s, and want %q", s.command, t.exited, s.want)
		}
	}
	t.frames[len(t.frames)-1].lasts = atEnd
	return nil
}

// run types a command, and waits for the next prompt.
func (t *terminal) run(command string) error {
	pause, typed := reading, promptWidth
	for some := range slices.Chunk([]byte(command), keys) {
		if _, err := t.tty.Write(some); err != nil {
			return err
		}
		typed += len(some)
		if err := t.read(pause, func() bool { return t.screen.CursorPosition().X == typed }); err != nil {
			return err
		}
		pause = shortest
	}
	t.exited = ""
	if _, err := t.tty.WriteString("\r"); err != nil {
		return err
	}
	return t.read(enter, t.prompts)
}

// prompts reports whether the shell waits for a command.
func (t *terminal) prompts() bool {
	return t.exited != "" && t.screen.CursorPosition().X == promptWidth
}

// read reads what the shell and its programs write until done. The frame that the terminal shows now lasts for pause,
// and the others as long as they did, within limits.
func (t *terminal) read(pause time.Duration, done func() bool) error {
	if err := t.tty.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	buffer := make([]byte, 4096)
	for !done() {
		n, err := t.tty.Read(buffer)
		if err != nil {
			return err
		}
		for _, e := range []*vt.Emulator{t.screen, t.whole} {
			if _, err := e.Write(buffer[:n]); err != nil {
				return err
			}
		}
		t.shoot(pause)
		pause = 0
	}
	return nil
}

// shoot adds a frame of the screen. The frame before it lasts for pause, or as long as it did if pause is 0. The new
// frame replaces one that is too short to see.
func (t *terminal) shoot(pause time.Duration) {
	at := t.screen.CursorPosition()
	f := frame{rows: svgRows(t.screen), cursorX: at.X, cursorY: at.Y}
	if last := len(t.frames) - 1; last >= 0 {
		if pause == 0 {
			pause = min(time.Since(t.since), longest)
		}
		if pause < shortest {
			t.frames[last] = f
			return
		}
		t.frames[last].lasts = pause
	}
	t.frames, t.since = append(t.frames, f), time.Now()
}

// text returns all that the terminal has shown and not erased.
func (t *terminal) text() string {
	var lines []string
	for line := range strings.Lines(t.whole.String()) {
		lines = append(lines, strings.TrimRight(line, " \r\n"))
	}
	return strings.TrimSpace(strings.Join(lines, "\n"))
}
