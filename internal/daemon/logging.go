package daemon

import (
	"log/slog"

	"gopkg.in/natefinch/lumberjack.v2"
	"k8s.io/klog/v2"
)

// openLog returns a logger that writes text lines to the file at path, which it opens with the first line and rotates.
// It also redirects the log of client-go there. The caller calls the function at the end.
func openLog(path string) (*slog.Logger, func() error) {
	file := &lumberjack.Logger{Filename: path, MaxSize: 10 /* MB */, MaxBackups: 2}
	logger := slog.New(slog.NewTextHandler(file, nil))
	klog.SetSlogLogger(logger.With("from", "client-go"))
	return logger, func() error {
		klog.ClearLogger()
		return file.Close()
	}
}
