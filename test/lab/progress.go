package lab

import (
	"fmt"
	"io"
	"os"
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
	text, start := fmt.Sprintf(format, args...), time.Now()
	if !p.terminal {
		fmt.Fprintf(p.w, "%s ...\n", text)
		return func(err error) {
			if err == nil && time.Since(start) > time.Second {
				fmt.Fprintf(p.w, "%s: done in %s\n", text, seconds(start))
			}
		}
	}
	fmt.Fprintf(p.w, "%s ...", text)
	stop := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(p.w, "\r%s ... %s", text, time.Since(start).Round(time.Second))
			case <-stop:
				return
			}
		}
	})
	return func(err error) {
		close(stop)
		ended.Wait()
		word := "done in " + seconds(start)
		if err != nil {
			word = "failed after " + seconds(start)
		}
		fmt.Fprintf(p.w, "\r%s ... %s\n", text, word)
	}
}

func (p *progress) say(format string, args ...any) { fmt.Fprintf(p.w, format+"\n", args...) }

func seconds(since time.Time) string { return fmt.Sprintf("%.1fs", time.Since(since).Seconds()) }
