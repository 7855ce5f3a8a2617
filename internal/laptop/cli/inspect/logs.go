package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/pkg/wakeup"
)

type logsOptions struct {
	f      *command.Factory
	follow bool
	tail   int
}

func newLogs(f *command.Factory) *cobra.Command {
	o := &logsOptions{f: f}
	cmd := &cobra.Command{
		Use:   "logs",
		Short: "Print the log of the daemon",
		Long: "Print the log file of the daemon, which need not be running. Older log files are in the same\n" +
			"directory. For the log of the traffic manager, use `kubectl logs -n kubevpn\n" +
			"deploy/kubevpn-traffic-manager`.",
		Example: command.Examples(
			"Print the log", "kubevpn logs",
			"Print the last 20 lines, then new lines as they are written", "kubevpn logs -f --tail 20",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "print new lines until Ctrl-C")
	cmd.Flags().IntVar(&o.tail, "tail", -1, "number of recent lines to print; -1 prints all")
	return cmd
}

func (o *logsOptions) run(ctx context.Context) error {
	paths, err := o.f.Paths()
	if err != nil {
		return err
	}
	t := &tailer{path: paths.LogFile()}
	defer t.close()
	switch err := t.open(o.tail); {
	case errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(o.f.Errout, "the log %s does not exist yet\n", t.path)
	case err != nil:
		return api.Errorf(api.ExitUnexpected, "cannot read the log: %w", err)
	}
	for {
		if err := t.copy(o.f.Out); err != nil {
			return api.Errorf(api.ExitUnexpected, "cannot read the log: %w", err)
		}
		if !o.follow || !wakeup.Pause(ctx, followInterval) {
			return nil // Ctrl-C is the regular end
		}
	}
}

// followInterval is the pause between two reads of a followed log.
const followInterval = 200 * time.Millisecond

// tailer reads a file that grows. The writer may rename it and start a new one, as lumberjack does when the file is
// full.
type tailer struct {
	path string
	file *os.File // nil: the file does not exist yet
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
	text, err := io.ReadAll(f) // at most 10 MB
	if err != nil {
		return err
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	complete := len(lines) - 1 // the last element is an incomplete line
	start := len(text) - len(bytes.Join(lines[max(0, complete-tail):], nil))
	_, err = f.Seek(int64(start), io.SeekStart)
	return err
}

// copy writes new data to w. After a rotation it writes the rest of the old file first.
func (t *tailer) copy(w io.Writer) error {
	for {
		next, err := t.next() // first: after a rotation nobody writes to the old file
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

// next returns the file at the path if it differs from the open one, else nil.
func (t *tailer) next() (*os.File, error) {
	f, err := os.Open(t.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // renamed, and the new file does not exist yet
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
		t.file.Close() // opened for reading: an error loses nothing
		t.file = nil
	}
}
