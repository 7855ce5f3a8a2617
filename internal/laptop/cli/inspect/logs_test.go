package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/testenv"
)

func TestTailStartsAtTheLastLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	long := strings.Repeat("x", 10000)
	if err := os.WriteFile(path, []byte("one\n"+long+"\nthree\nno end"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		tail int
		want string
	}{
		{-1, "one\n" + long + "\nthree\nno end"},
		{0, "no end"},
		{1, "three\nno end"},
		{2, long + "\nthree\nno end"},
		{3, "one\n" + long + "\nthree\nno end"},
		{9, "one\n" + long + "\nthree\nno end"},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.tail), func(t *testing.T) {
			l := &tailer{path: path}
			defer l.close()
			var out bytes.Buffer
			if err := errors.Join(l.open(tt.tail), l.copy(&out)); err != nil {
				t.Fatal(err)
			}
			if out.String() != tt.want {
				t.Errorf("tail = %.40q..., want %.40q...", out.String(), tt.want)
			}
		})
	}
}

func TestFollowContinuesAfterRotation(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kubevpn", "daemon.log")
	f := &command.Factory{Streams: term.Streams{Out: &testenv.Buffer{}, Errout: &testenv.Buffer{}}, Lookup: func(name string) (string, bool) {
		return map[string]string{"XDG_STATE_HOME": dir, "HOME": dir}[name], true
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- (&logsOptions{f: f, follow: true, tail: -1}).run(ctx) }()
	seen := func(text string) func() bool {
		return func() bool { return f.Out.(*testenv.Buffer).String() == text }
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	appendTo := func(path, text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		must(err)
		_, err = f.WriteString(text)
		must(errors.Join(err, f.Close()))
	}
	must(os.MkdirAll(filepath.Dir(path), 0o700)) // following began before there was a log
	appendTo(path, "one\n")
	testenv.Until(t, "the first line", seen("one\n"))
	appendTo(path, "two\n")
	must(os.Rename(path, path+".1"))
	appendTo(path+".1", "three\n")
	appendTo(path, "four\n")
	testenv.Until(t, "the rest, in order", seen("one\ntwo\nthree\nfour\n"))
	cancel()
	if err := <-done; err != nil {
		t.Errorf("run = %v, want nil", err)
	}
}
