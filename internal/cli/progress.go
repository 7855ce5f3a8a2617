package cli

import (
	"cmp"
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

// progress shows events while they happen. stop ends what is being shown; more events may follow it.
type progress interface {
	show(api.Event)
	stop()
}

// newProgress shows steps for people on errout: moving on a terminal, plain lines elsewhere.
func (a *app) newProgress() progress {
	if f, ok := a.errout.(*os.File); ok && term.IsTerminal(int(f.Fd())) && a.getenv("TERM") != "dumb" {
		return &spinner{lines: lines{w: a.errout}, width: func() int {
			if w, _, err := term.GetSize(int(f.Fd())); err == nil {
				return w
			}
			return 80
		}}
	}
	return &lines{w: a.errout}
}

// slow is how long a step may take before its duration is worth telling.
const slow = time.Second

// lines prints each step when it begins, what is seen on the way, and how long it took:
//
//	Installing the traffic manager
//	Installing the traffic manager: pulling the image
//	✓ Installing the traffic manager: kubevpn/kubevpn-traffic-manager (4.2s)
//	! the traffic manager may not read Services: ...
type lines struct {
	w     io.Writer
	last  string               // the line printed last
	begun map[string]time.Time // steps that have begun; one may be part of another
}

// begin notes when the event's step began.
func (l *lines) begin(e api.Event) {
	if l.begun == nil {
		l.begun = map[string]time.Time{}
	}
	if _, known := l.begun[e.Step]; !known {
		l.begun[e.Step] = when(e)
	}
}

// when is the event's time.
func when(e api.Event) time.Time { return cmp.Or(e.Time, time.Now()) }

func (l *lines) show(e api.Event) {
	l.begin(e)
	if e.Warning != "" {
		fmt.Fprintf(l.w, "! %s\n", e.Warning)
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

func (l *lines) stop() {}

// text is the step, what is seen, and, at its end, how long it took.
func (l *lines) text(e api.Event) string {
	s := e.Step
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if took := when(e).Sub(l.begun[e.Step]); e.Done && took > slow {
		s += fmt.Sprintf(" (%.1fs)", took.Seconds())
	}
	return s
}

// spinner is lines on a terminal: a step that is being done is one line that moves.
type spinner struct {
	mu    sync.Mutex
	lines lines
	width func() int
	event api.Event // being shown
	quit  chan struct{}
	ended chan struct{}
}

const spinnerPeriod = 100 * time.Millisecond

func (s *spinner) show(e api.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines.begin(e)
	if e.Warning != "" || e.Done {
		s.erase()
		s.lines.show(e)
	}
	switch {
	case e.Done:
		s.event = api.Event{}
	case e.Step != "":
		s.event = e
		s.draw(0)
		s.spin()
	}
}

// spin begins to move; s.mu is held.
func (s *spinner) spin() {
	if s.quit != nil {
		return
	}
	quit, ended := make(chan struct{}), make(chan struct{})
	s.quit, s.ended = quit, ended
	go func() {
		defer close(ended)
		tick := time.NewTicker(spinnerPeriod)
		defer tick.Stop()
		for frame := 1; ; frame++ {
			select {
			case <-quit:
				return
			case <-tick.C:
				s.mu.Lock()
				s.draw(frame)
				s.mu.Unlock()
			}
		}
	}()
}

func (s *spinner) stop() {
	s.mu.Lock()
	quit, ended := s.quit, s.ended
	s.quit = nil
	s.mu.Unlock()
	if quit == nil {
		return
	}
	close(quit)
	<-ended
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	s.event = api.Event{}
}

// draw writes the line of the step that is being done; s.mu is held.
func (s *spinner) draw(frame int) {
	if s.event.Step == "" {
		return
	}
	text := s.lines.text(s.event)
	if took := time.Since(s.lines.begun[s.event.Step]); took > slow {
		text += fmt.Sprintf(" (%ds)", int(took.Seconds()))
	}
	frames := []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
	line := []rune(string(frames[frame%len(frames)]) + " " + strings.ReplaceAll(text, "\n", " "))
	if w := s.width(); len(line) >= w && w > 1 {
		line = append(line[:w-2], '…')
	}
	fmt.Fprintf(s.lines.w, "\r\x1b[K%s", string(line))
}

// erase takes that line away; s.mu is held.
func (s *spinner) erase() { fmt.Fprint(s.lines.w, "\r\x1b[K") }

// jsonLines writes every event to w, for programs.
type jsonLines struct{ w io.Writer }

func (j jsonLines) show(e api.Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	writeJSON(j.w, e)
}

func (jsonLines) stop() {}

// writeJSON writes v as one line. Whoever stopped reading our output does not want to hear of it.
func writeJSON(w io.Writer, v any) {
	if err := json.NewEncoder(w).Encode(v); err != nil {
		return
	}
}
