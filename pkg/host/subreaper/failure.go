package subreaper

import (
	"errors"
	"syscall"
)

// Failure is an error as JSON. It keeps the text and the errno of the original.
type Failure struct {
	Text  string        `json:"text"`
	Errno syscall.Errno `json:"errno,omitempty"`
}

// failureBytes limits the length of the text: JSON encodes a byte in at most six, and a packet holds 64 KiB.
const failureBytes = 8 << 10

// NewFailure returns err as a Failure, or nil for a nil error.
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
