package lab

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// progress prints the current step. On a terminal the line of a long step counts the seconds.
type progress struct {
	w        io.Writer
	terminal bool
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	return &progress{w: w, terminal: ok && term.IsTerminal(int(f.Fd()))}
}

// step prints a step. The returned function ends it; the caller reports an error.
func (p *progress) step(format string, args ...any) (done func(error)) {
	return p.counted(func() string { return "" }, format, args...)
}

// plainInterval is the time between two lines of a long step that is not on a terminal.
const plainInterval = 30 * time.Second

// counted is step for a step that can report its progress: it calls status from time to time, and prints the result if
// it is not empty.
func (p *progress) counted(status func() string, format string, args ...any) (done func(error)) {
	text, start := fmt.Sprintf(format, args...), time.Now()
	every := time.Second
	if p.terminal {
		fmt.Fprintf(p.w, "%s ...", text)
	} else {
		fmt.Fprintf(p.w, "%s ...\n", text)
		every = plainInterval
	}
	stop := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				how := status()
				switch {
				case p.terminal:
					how = strings.TrimSpace(time.Since(start).Round(time.Second).String() + "  " + how)
					fmt.Fprintf(p.w, "\r%s ... %s\x1b[K", text, how)
				case how != "":
					fmt.Fprintf(p.w, "%s: %s\n", text, how)
				}
			case <-stop:
				return
			}
		}
	})
	return func(err error) {
		close(stop)
		ended.Wait()
		word := "done"
		if err != nil {
			word = "failed"
		}
		switch {
		case p.terminal:
			fmt.Fprintf(p.w, "\r%s ... %s in %s\x1b[K\n", text, word, seconds(start))
		case err == nil && time.Since(start) > time.Second:
			fmt.Fprintf(p.w, "%s: %s in %s\n", text, word, seconds(start))
		}
	}
}

func (p *progress) say(format string, args ...any) { fmt.Fprintf(p.w, format+"\n", args...) }

func seconds(since time.Time) string { return fmt.Sprintf("%.1fs", time.Since(since).Seconds()) }
