package dev

import (
	"context"
	"fmt"
	"log/slog"
)

// warner is a slog.Handler that shows warnings and errors to the user, because this process has no log file.
type warner struct {
	warn  func(text string)
	attrs string
	group string
}

func (w warner) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

func (w warner) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		w = w.with(a)
		return true
	})
	text := r.Message
	if w.attrs != "" {
		text += " (" + w.attrs + ")"
	}
	w.warn(text)
	return nil
}

func (w warner) with(a slog.Attr) warner {
	if w.attrs != "" {
		w.attrs += ", "
	}
	w.attrs += fmt.Sprintf("%s%s: %v", w.group, a.Key, a.Value.Resolve())
	return w
}

func (w warner) WithAttrs(attrs []slog.Attr) slog.Handler {
	for _, a := range attrs {
		w = w.with(a)
	}
	return w
}

func (w warner) WithGroup(name string) slog.Handler {
	w.group += name + "."
	return w
}
