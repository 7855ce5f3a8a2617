//go:build unix

package cluster

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

func runPlugin(t *testing.T, timeout time.Duration, script string) (code int, stdout, stderr string, took time.Duration) {
	t.Helper()
	var out, errs bytes.Buffer
	start := time.Now()
	code = ExecCredential(t.Context(), ExecRun{
		Argv: []string{"/bin/sh", "-c", script}, Timeout: timeout, Env: append(os.Environ(), "TOKEN=secret"), Stdout: &out, Stderr: &errs,
	})
	return code, out.String(), errs.String(), time.Since(start)
}

func TestExecCredential(t *testing.T) {
	tests := []struct {
		name, script   string
		code           int
		stdout, stderr string
	}{
		{"answers", `echo "$TOKEN"`, 0, "secret\n", ""},
		{"fails", `echo expired >&2; exit 3`, 3, "", "expired\n"},
		{"has no input", `cat; echo done`, 0, "done\n", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			code, stdout, stderr, _ := runPlugin(t, time.Minute, tt.script)
			if code != tt.code || stdout != tt.stdout || stderr != tt.stderr {
				t.Fatalf("code %d, %q, %q; want %d, %q, %q", code, stdout, stderr, tt.code, tt.stdout, tt.stderr)
			}
		})
	}
}

// A plugin that hangs is killed with everything it started.
func TestExecCredentialHangs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	code, _, stderr, took := runPlugin(t, 300*time.Millisecond, `sleep 1000 & echo $! > `+file+`; wait`)
	if code != 124 || stderr != "kubevpn: the credential plugin /bin/sh did not answer within 300ms and was killed\n" {
		t.Fatalf("code %d, %q", code, stderr)
	}
	if took > 5*time.Second {
		t.Fatalf("took %v", took)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the plugin's child is dead", func() bool { return !alive(pid) })
}

// alive is false for a zombie, too: nobody may be there to reap it.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || !strings.Contains(string(stat), ") Z ")
}

// A helper that the plugin leaves behind does not hold it up.
func TestExecCredentialLeavesHelper(t *testing.T) {
	code, stdout, _, took := runPlugin(t, time.Minute, `sleep 3 & echo token`)
	if code != 0 || stdout != "token\n" || took > 2500*time.Millisecond {
		t.Fatalf("code %d, %q, after %v", code, stdout, took)
	}
}

func TestExecCredentialMissing(t *testing.T) {
	var errs bytes.Buffer
	for _, argv := range [][]string{{"/no/such/plugin"}, {"no-such-plugin-at-all"}} {
		if code := ExecCredential(context.Background(), ExecRun{Argv: argv, Stderr: &errs}); code != 127 {
			t.Fatalf("%v: code %d, %s", argv, code, &errs)
		}
	}
}
