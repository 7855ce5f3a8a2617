package workload

import (
	"bytes"
	"context"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/filecopy"
	"kubevpn/pkg/wire/remotefs"
)

// transferred uploads a file to a server, and returns what the command prints.
func transferred(t *testing.T, ctx context.Context, format string, readOnly bool) (out string, warnings []string,
	err error) {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	server, err := remotefs.NewServer(root, readOnly)
	if err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	served := make(chan error)
	go func() { served <- server.Serve(context.Background(), far) }()
	local := t.TempDir() + "/a"
	if err := os.WriteFile(local, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	o := &cpOptions{f: &command.Factory{Streams: term.Streams{Out: &b}}, output: term.NewFormat("text", "json"),
		copy: filecopy.Copy{Conn: near, Remote: ".", Path: "/app", Local: local, Upload: true}}
	if err := o.output.Set(format); err != nil {
		t.Fatal(err)
	}
	err = o.transfer(ctx, func(e api.Event) { warnings = append(warnings, e.Warning) }, func() {})
	if err := <-served; err != nil {
		t.Error(err)
	}
	return b.String(), warnings, err
}

func TestCpPrintsWhatItHasCopied(t *testing.T) {
	for format, want := range map[string]string{
		"text": `^copied 1 file, 4 B in \d+\.\ds \(skipped 0 that were there\)\n$`,
		"json": `^{\n  "bytes": 4,\n  "files": 1,\n  "seconds": [\de.-]+,\n  "skipped": 0\n}\n$`,
	} {
		out, warnings, err := transferred(t, t.Context(), format, false)
		if err != nil || !regexp.MustCompile(want).MatchString(out) || len(warnings) > 0 {
			t.Errorf("%s: %q, %q, %v", format, out, warnings, err)
		}
	}
}

func TestCpFailsIfAFileFails(t *testing.T) {
	_, warnings, err := transferred(t, t.Context(), "text", true)
	e := api.AsError(err)
	if e == nil || e.Code != api.ExitUnexpected || e.Message != "cannot copy 1 file" || len(warnings) != 1 ||
		warnings[0] != "a: read-only file system" {
		t.Errorf("%+v, %q", e, warnings)
	}
}

func TestInterruptedCpCanContinue(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	out, _, err := transferred(t, ctx, "text", false)
	if e := api.AsError(err); e == nil || e.Code != api.ExitInterrupted || !strings.Contains(e.Hint, "continues") || out != "" {
		t.Errorf("%+v, %q", e, out)
	}
}
