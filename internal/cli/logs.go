package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
)

type logsOptions struct {
	app    *app
	follow bool
	tail   int
}

func newLogs(a *app) *cobra.Command {
	o := &logsOptions{app: a}
	cmd := &cobra.Command{
		Use:   "logs",
		Short: "Show the daemon's log",
		Long: "Logs shows the log that the daemon keeps in a file, also when no daemon is running. Older logs lie\n" +
			"beside it. The traffic manager's log is the cluster's: `kubectl logs -n kubevpn deploy/kubevpn-traffic-manager`.",
		Example: examples(
			"Show the log", "kubevpn logs",
			"Watch the last lines and those that come", "kubevpn logs -f --tail 20",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on with what is written, until Ctrl-C")
	cmd.Flags().IntVar(&o.tail, "tail", -1, "begin with this many lines before the end (default all)")
	return cmd
}

func (o *logsOptions) run(ctx context.Context) error {
	paths, err := o.app.paths()
	if err != nil {
		return err
	}
	t := &tailer{path: paths.LogFile()}
	defer t.close()
	switch err := t.open(o.tail); {
	case errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(o.app.errout, "there is no log yet at %s\n", t.path)
	case err != nil:
		return api.Errorf(api.ExitUnexpected, "reading the log: %w", err)
	}
	for {
		if err := t.copy(o.app.out); err != nil {
			return api.Errorf(api.ExitUnexpected, "reading the log: %w", err)
		}
		if !o.follow {
			return nil
		}
		pause(ctx, followInterval)
		if ctx.Err() != nil {
			return nil // Ctrl-C is how following ends
		}
	}
}

// followInterval is how often a followed log is looked at.
const followInterval = 200 * time.Millisecond

// tailer reads a file that grows, and that may be renamed and begun anew (lumberjack does that when it is full).
type tailer struct {
	path string
	file *os.File // nil: there was none yet
}

// open opens the file at its start, or at its last lines if tail is not negative.
func (t *tailer) open(tail int) error {
	f, err := os.Open(t.path)
	if err != nil {
		return err
	}
	t.file = f
	if tail < 0 {
		return nil
	}
	// The lines' ends are counted in a first pass: the file is small, and a log's lines are of any length.
	ends := make([]int64, 0, 1024)
	var at int64
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadSlice('\n')
		at += int64(len(line))
		switch {
		case err == nil:
			ends = append(ends, at)
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF):
			start := int64(0)
			if tail < len(ends) {
				start = ends[len(ends)-tail-1]
			}
			_, err := f.Seek(start, io.SeekStart)
			return err
		default:
			return err
		}
	}
}

// copy writes what is new, also across a rotation: the old file to its end, then the new one.
func (t *tailer) copy(w io.Writer) error {
	for {
		next, err := t.next() // looked up first: what the old file has by now, it has for good
		if err != nil {
			return err
		}
		if t.file != nil {
			if _, err := io.Copy(w, t.file); err != nil {
				return err
			}
		}
		if next == nil {
			return nil
		}
		t.close()
		t.file = next
	}
}

// next returns the file that is at the path now, if it is another one than ours.
func (t *tailer) next() (*os.File, error) {
	f, err := os.Open(t.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // between the renaming and the new beginning
	}
	if err != nil || t.file == nil {
		return f, err
	}
	now, err := f.Stat()
	if err == nil {
		var ours fs.FileInfo
		if ours, err = t.file.Stat(); err == nil && !os.SameFile(ours, now) {
			return f, nil
		}
	}
	return nil, errors.Join(err, f.Close())
}

func (t *tailer) close() {
	if t.file != nil {
		t.file.Close() // opened for reading: there is nothing to lose
		t.file = nil
	}
}
