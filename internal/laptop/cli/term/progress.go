package term

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"kubevpn/internal/api"
)

// Progress shows events as they happen. Stop removes a moving line; more events may follow.
type Progress interface {
	Show(api.Event)
	Stop()
}

// Progress returns a progress on Errout: a spinner on a terminal, else plain lines. Log lines would break a spinner.
func (s *Streams) Progress() Progress {
	if s.Quiet {
		return &lines{w: io.Discard}
	}
	if f := File(s.Errout); f != nil && !s.Dumb && s.Verbosity <= 0 {
		return &spinner{lines: lines{w: s.Errout}, screen: f, width: func() int {
			if w, _, err := term.GetSize(int(f.Fd())); err == nil {
				return w
			}
			return 80
		}}
	}
	return &lines{w: s.Errout}
}

// Report runs a command that shows its progress: as text, or as lines of JSON, the last of which contains the result.
// output is nil if the progress is always text. do may call quiet to stop the progress display.
func (s *Streams) Report(ctx context.Context, output *Format,
	do func(ctx context.Context, on func(api.Event), quiet func()) error) error {
	p := s.Progress()
	asJSON := output != nil && output.value == "json"
	if asJSON {
		p = jsonLines{s.Out}
	}
	outputs := []Progress{p}
	if s.Events > 0 {
		file := os.NewFile(uintptr(s.Events), "events")
		closeOnExec(s.Events) // of the programs that this one starts, none writes events
		defer file.Close()
		outputs = append(outputs, jsonLines{file})
	}
	defer p.Stop()
	shown := false
	err := do(ctx, func(e api.Event) {
		shown = shown || e.Error != nil
		for _, o := range outputs {
			o.Show(e)
		}
	}, p.Stop)
	p.Stop()
	for _, o := range outputs {
		if lines, is := o.(jsonLines); is && err != nil && !shown { // people get the error from Main
			lines.Show(api.Event{Error: AsError(ctx, err)})
		}
	}
	return err
}

// slow is the duration from which on a step is shown with its duration.
const slow = time.Second

// lines prints each step when it begins, its details, and its duration:
//
//	Installing the traffic manager
//	Installing the traffic manager: pulling the image
//	✓ Installing the traffic manager: kubevpn/kubevpn-traffic-manager (4.2s)
//	! the traffic manager may not read Services: ...
type lines struct {
	w     io.Writer
	last  string               // the line printed last
	begun map[string]time.Time // start of each open step; a step may contain another
}

// begin records when the step of the event began.
func (l *lines) begin(e api.Event) {
	if l.begun == nil {
		l.begun = map[string]time.Time{}
	}
	if _, known := l.begun[e.Step]; !known {
		l.begun[e.Step] = when(e)
	}
}

// when returns the time of the event.
func when(e api.Event) time.Time { return cmp.Or(e.Time, time.Now()) }

func (l *lines) Show(e api.Event) {
	l.begin(e)
	if e.Warning != "" {
		fmt.Fprintf(l.w, "! %s\n", indented(e.Warning))
	}
	switch line := l.text(e); {
	case e.Step == "":
	case e.Done:
		fmt.Fprintf(l.w, "✓ %s\n", line)
		delete(l.begun, e.Step)
		l.last = ""
	case line != l.last:
		fmt.Fprintln(l.w, line)
		l.last = line
	}
}

func (l *lines) Stop() {}

// text returns the step, its detail and, when it is done, its duration.
func (l *lines) text(e api.Event) string {
	s := e.Step
	if e.Detail != "" {
		s += ": " + indented(e.Detail)
	}
	if took := when(e).Sub(l.begun[e.Step]); e.Done && took > slow {
		s += fmt.Sprintf(" (%.1fs)", took.Seconds())
	}
	return s
}

// spinner is lines on a terminal, with one moving line for the current step.
type spinner struct {
	mu     sync.Mutex
	lines  lines
	screen io.Writer // for the moving line; interprets escape sequences
	width  func() int
	event  api.Event // of the current step; the zero Event: there is no moving line
	frame  int
	timer  *time.Timer // calls redraw; nil: no event has been shown
}

const spinnerPeriod = 100 * time.Millisecond

func (s *spinner) Show(e api.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines.begin(e)
	if e.Warning != "" || e.Done {
		s.erase()
		s.lines.Show(e)
	}
	switch {
	case e.Done:
		s.event = api.Event{}
	case e.Step != "":
		s.event = e
		s.draw()
		if s.timer == nil {
			s.timer = time.AfterFunc(spinnerPeriod, s.redraw)
		} else {
			s.timer.Reset(spinnerPeriod)
		}
	}
}

// redraw draws the next frame, and calls itself again after spinnerPeriod while there is a moving line.
func (s *spinner) redraw() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.event.Step != "" {
		s.frame++
		s.draw()
		s.timer.Reset(spinnerPeriod)
	}
}

func (s *spinner) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.event.Step != "" {
		s.erase()
	}
	s.event = api.Event{}
}

// draw writes the moving line. The caller holds s.mu.
func (s *spinner) draw() {
	text := s.lines.text(s.event)
	if took := time.Since(s.lines.begun[s.event.Step]); took > slow {
		text += fmt.Sprintf(" (%ds)", int(took.Seconds()))
	}
	frames := []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
	line := []rune(string(frames[s.frame%len(frames)]) + " " + strings.ReplaceAll(api.Clean(text), "\n", " "))
	if w := s.width(); len(line) >= w && w > 1 {
		line = append(line[:w-2], '…')
	}
	fmt.Fprintf(s.screen, "\r\x1b[K%s", string(line))
}

// erase removes the moving line. The caller holds s.mu.
func (s *spinner) erase() { fmt.Fprint(s.screen, "\r\x1b[K") }

// jsonLines writes every event to w as a line of JSON.
type jsonLines struct{ w io.Writer }

func (j jsonLines) Show(e api.Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.TypeMeta = api.Type(api.KindEvent)
	_ = json.NewEncoder(j.w).Encode(e) // an error means that the reader has closed the output
}

func (jsonLines) Stop() {}
