package api_test

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// endless is a peer that never ends its line.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '['
	}
	e.read += len(p)
	return len(p), nil
}

func TestLinesRejectsALineThatIsTooLong(t *testing.T) {
	var e endless
	var v any
	if err := api.NewLines(&e, 1<<20).Next(&v); !errors.Is(err, bufio.ErrTooLong) {
		t.Errorf("an endless line gives %v", err)
	}
	if e.read > 2<<20 {
		t.Errorf("%d bytes were read of an endless line, of which 1 MiB is allowed", e.read)
	}
}

func TestLinesReadsLineByLine(t *testing.T) {
	l := api.NewLines(strings.NewReader("{\"protocol\":1}\n{\"protocol\":2}\nno JSON\n"), 100)
	var h api.AgentHello
	for want := 1; want <= 2; want++ {
		if err := l.Next(&h); err != nil || h.Protocol != want {
			t.Errorf("line %d gives %+v, %v", want, h, err)
		}
	}
	if err := l.Next(&h); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("what is no JSON gives %v", err)
	}
	if err := l.Next(&h); err != io.EOF {
		t.Errorf("the end gives %v", err)
	}
}
