package daemon

import (
	"io"
	"log/slog"

	"gopkg.in/natefinch/lumberjack.v2"
	"k8s.io/klog/v2"
)

// The log's size on disk is bounded: this many files of this many megabytes.
const (
	logMegabytes = 10
	logBackups   = 2
)

// openLog returns a logger that writes text lines to the file at path, which is rotated, and takes over what
// client-go writes through klog. Nothing is opened before the first line. Call the function at the end.
func openLog(path string) (*slog.Logger, func() error) {
	file := &lumberjack.Logger{Filename: path, MaxSize: logMegabytes, MaxBackups: logBackups}
	logger := newLogger(file)
	klog.SetSlogLogger(logger.With("from", "client-go"))
	return logger, func() error {
		klog.ClearLogger()
		return file.Close()
	}
}

func newLogger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelInfo}))
}
