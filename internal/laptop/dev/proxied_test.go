package dev

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
)

// proxiedRunner returns a Runner of a shell script, and the file that gets its output.
func proxiedRunner(t *testing.T, script string) (r *Runner, output func() string) {
	t.Helper()
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	r, err = New(t.Context(), Options{
		Mode: Proxied, Args: []string{"sh", "-c", script}, Environ: append(os.Environ(), "HTTP_PROXY=http://other"),
		Stdout: out, Stderr: out, Show: func(api.Event) {}, Quiet: func() {},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r, func() string {
		b, err := os.ReadFile(out.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

// serves is a Hold whose proxy serves until ctx ends. It notes whether it has ended.
func serves(ended *bool) func(context.Context, sandbox.Place, func(api.Event)) error {
	return func(ctx context.Context, _ sandbox.Place, on func(api.Event)) error {
		on(api.Event{Connection: &api.Connection{SOCKS: &api.SOCKS{
			Address: "127.0.0.1:1080", User: "kubevpn", Password: "secret",
		}}})
		<-ctx.Done()
		*ended = true
		return nil
	}
}

func TestProxiedProgramHasTheProxysVariables(t *testing.T) {
	r, output := proxiedRunner(t, `echo $HTTP_PROXY $https_proxy; echo $ALL_PROXY; echo $no_proxy; exit 7`)
	ended := false
	code, err := r.Run(t.Context(), Target{Hold: serves(&ended)})
	if code != 7 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	const at = "kubevpn:secret@127.0.0.1:1080"
	want := "http://" + at + " http://" + at + "\nsocks5h://" + at + "\nlocalhost,127.0.0.1,::1\n"
	if got := output(); got != want {
		t.Errorf("the program has\n%s\nwant\n%s", got, want)
	}
	if !ended {
		t.Error("the connection is left")
	}
}

func TestProxiedProgramsSignalIsItsExitCode(t *testing.T) {
	r, _ := proxiedRunner(t, `kill -TERM $$`)
	ended := false
	if code, err := r.Run(t.Context(), Target{Hold: serves(&ended)}); code != 128+15 || err != nil {
		t.Errorf("exit code %d, %v; want 143", code, err)
	}
}

func TestProxiedProgramDoesNotStartWithoutAProxy(t *testing.T) {
	r, output := proxiedRunner(t, `echo started`)
	want := errors.New("no cluster")
	_, err := r.Run(t.Context(), Target{Hold: func(context.Context, sandbox.Place, func(api.Event)) error { return want }})
	if !errors.Is(err, want) || strings.Contains(output(), "started") {
		t.Errorf("error %v, output %q", err, output())
	}
}

func TestProxiedMissingProgramIsAUsageError(t *testing.T) {
	r, _ := proxiedRunner(t, "")
	r.Args = []string{"kubevpn-no-such-program"}
	ended := false
	_, err := r.Run(t.Context(), Target{Hold: serves(&ended)})
	if err == nil || api.AsError(err).Code != api.ExitUsage || !ended {
		t.Errorf("error %v; connection ended: %v", err, ended)
	}
}
