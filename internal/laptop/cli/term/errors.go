package term

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"kubevpn/internal/api"
)

// AsError converts the error of a command for the user, or for a program that reads the output.
func AsError(ctx context.Context, err error) *api.Error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return api.Errorf(api.ExitInterrupted, "interrupted")
	}
	return api.AsError(err)
}

// PrintError writes the message of e and, indented, its hint.
func PrintError(w io.Writer, e *api.Error) { fmt.Fprintln(w, strings.Join(ErrorLines(e), "\n")) }

// ErrorLines returns the message of e and, indented, its hint. It returns nothing if e is nil.
func ErrorLines(e *api.Error) []string {
	if e == nil {
		return nil
	}
	return strings.Split(indented(strings.TrimRight("Error: "+e.Message+"\n"+e.Hint, "\n")), "\n")
}

// indented indents all lines but the first, so that text of the cluster cannot imitate lines of kubevpn.
func indented(text string) string { return strings.ReplaceAll(text, "\n", "\n  ") }
