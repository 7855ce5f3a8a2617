package pid1

import (
	"errors"
	"syscall"
)

// Failure is an error that crosses a socket, as JSON, and keeps its errno.
type Failure struct {
	Text  string        `json:"text"`
	Errno syscall.Errno `json:"errno,omitempty"`
}

// failureBytes is how long its text is at most: JSON makes at most six bytes of one, and packets are 64 KiB.
const failureBytes = 8 << 10

// NewFailure is nil for no error.
func NewFailure(err error) *Failure {
	if err == nil {
		return nil
	}
	f := &Failure{Text: err.Error()}
	errors.As(err, &f.Errno)
	f.Text = f.Text[:min(len(f.Text), failureBytes)]
	return f
}

func (f *Failure) Error() string { return f.Text }

func (f *Failure) Unwrap() error {
	if f.Errno == 0 {
		return nil
	}
	return f.Errno
}
