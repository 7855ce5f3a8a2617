package api

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Lines reads JSON values from an untrusted peer, one on each line. It buffers at most one line of limited length.
type Lines struct {
	scanner *bufio.Scanner
	limit   int
}

// NewLines returns a Lines that reads from r. A line may have at most limit bytes.
func NewLines(r io.Reader, limit int) *Lines {
	l := &Lines{bufio.NewScanner(r), limit}
	l.scanner.Buffer(nil, limit)
	return l
}

// Next decodes the next line into v. It returns io.EOF at the end.
func (l *Lines) Next(v any) error {
	if !l.scanner.Scan() {
		switch err := l.scanner.Err(); {
		case errors.Is(err, bufio.ErrTooLong):
			return fmt.Errorf("a message of more than %d bytes: %w", l.limit, err)
		case err != nil:
			return err
		}
		return io.EOF
	}
	return json.Unmarshal(l.scanner.Bytes(), v)
}
