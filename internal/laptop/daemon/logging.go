package daemon

import (
	"io"
	"log/slog"
	"strings"
	"sync"

	"gopkg.in/natefinch/lumberjack.v2"
	"k8s.io/klog/v2"

	"kubevpn/internal/api"
)

// openLog returns a logger that writes text lines to recent and to the file at path, which it opens with the first line
// and rotates. It also redirects the log of client-go there. The caller calls the function at the end.
func openLog(path string, recent *recentLog) (*slog.Logger, func() error) {
	file := &lumberjack.Logger{Filename: path, MaxSize: 10 /* MB */, MaxBackups: 2}
	logger := slog.New(slog.NewTextHandler(io.MultiWriter(recent, file), nil))
	klog.SetSlogLogger(logger.With("from", "client-go"))
	return logger, func() error {
		klog.ClearLogger()
		return file.Close()
	}
}

const (
	maxLogLines = 500
	maxLogLine  = 4 << 10 // bytes; longer lines are cut
)

// recentLog remembers the last lines of the log, for the page. The zero value is ready. It is safe for concurrent use.
type recentLog struct {
	mu    sync.Mutex
	lines []string
	count int // of all lines
}

// Write implements io.Writer for a slog.Handler, which writes one line at a time.
func (l *recentLog) Write(line []byte) (int, error) {
	text := strings.Clone(api.CleanLine(string(line[:min(len(line), maxLogLine)])))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines[max(0, len(l.lines)+1-maxLogLines):], text)
	l.count++
	return len(line), nil
}

// since returns the lines from number n on, as far as they are remembered, and the number of the next one.
func (l *recentLog) since(n int) (lines []string, next int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	forgotten := l.count - len(l.lines)
	return append([]string{}, l.lines[max(0, n-forgotten):]...), l.count // never null
}
