//go:build linux

package main

import (
	"bytes"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const file = "../../../docs/first-minute.svg"

// shell returns a shell as that of the picture.
func shell() *exec.Cmd {
	cmd := exec.Command("bash", "--norc", "--noprofile", "-i")
	cmd.Env = []string{"TERM=xterm-256color", "LANG=C.UTF-8", "PATH=" + os.Getenv("PATH"), "PS1=" + prompt, "HISTFILE="}
	return cmd
}

func TestRecordingHasWhatTheTerminalShowed(t *testing.T) {
	r, err := recordShell(shell(), []step{
		{`printf 'wait\r\e[Kdo%s\n' ne`, "done"},
		{"echo '<a & b>'; seq 2 30", "30"},
	})
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(r.text, "\n")
	want := []string{`$ printf 'wait\r\e[Kdo%s\n' ne`, "done", "$ echo '<a & b>'; seq 2 30", "<a & b>", "2"}
	if len(lines) != 34 || !slices.Equal(lines[:5], want) {
		t.Errorf("%q", lines)
	}
	made := r.svg()
	if text, err := textOf(made); err != nil || text != r.text {
		t.Errorf("%q, %v", text, err)
	}
	if len(r.frames) < 10 {
		t.Errorf("%d frames do not show how the commands are typed", len(r.frames))
	}
	last := strings.Join(r.frames[len(r.frames)-1].rows, "\n")
	if strings.Contains(last, "a &amp; b") || !strings.Contains(last, ">30</text>") {
		t.Errorf("the last frame does not show the end: %s", last)
	}
	if n := bytes.Count(made, []byte(">done</text>")); n != 1 {
		t.Errorf("the picture has a line %d times", n)
	}
}

func TestRecordingFailsIfACommandDoes(t *testing.T) {
	for command, reason := range map[string]string{"false": "exit code 133;D;1", "echo yes": `want "no"`} {
		_, err := recordShell(shell(), []step{{command, "no"}})
		if err == nil || !strings.Contains(err.Error(), reason) || !strings.Contains(err.Error(), "$ "+command) {
			t.Errorf("%s: %v", command, err)
		}
	}
}

func TestPicturesOfTwoRunsAreTheSame(t *testing.T) {
	picture := func(text string) []byte { return (&recording{frames: []frame{{rows: []string{""}}}, text: text}).svg() }
	run := picture("$ kubevpn connect\n✓ Finding: pod m-7bc6987cc8-k5bws (1.3s)\nConnected (9c7d7aec88f4)\n 10.244.1.2:53: in 6 ms")
	for _, tt := range []struct {
		text string
		same bool
	}{
		{"$ kubevpn connect\n✓ Finding: pod m-79f6c8dd9d-abcde\nConnected (0123456789ab)\n 10.244.2.12:53: in 1.1 s", true},
		{"$ kubevpn connect -n a\n✓ Finding: pod m-79f6c8dd9d-abcde\nConnected (0123456789ab)\n 10.244.2.12:53: in 1.1 s", false},
		{"$ kubevpn connect\nConnected (0123456789ab)\n 10.244.2.12:53: in 1.1 s", false},
	} {
		if err := same(run, picture(tt.text)); (err == nil) != tt.same {
			t.Errorf("%s\n%v", tt.text, err)
		}
	}
}

// The suites compare the whole picture with a new one: TestREADMEDemoShowsThePage.
func TestPictureShowsTheFirstMinute(t *testing.T) {
	svg, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text, err := textOf(svg)
	if err != nil {
		t.Fatal(err)
	}
	var shown, want []string
	for line := range strings.Lines(text) {
		if command, ok := strings.CutPrefix(strings.TrimSpace(line), "$ "); ok {
			shown = append(shown, command)
		}
	}
	for _, s := range firstMinute() {
		want = append(want, s.command)
		if !strings.Contains(text, s.want) {
			t.Errorf("the picture does not show %q", s.want)
		}
	}
	if diff := cmp.Diff(want, shown); diff != "" {
		t.Errorf("the picture shows other commands: run `make picture` (-want +shown)\n%s", diff)
	}
	if len(svg) > 200_000 || bytes.Contains(svg, []byte("<script")) || bytes.Contains(svg, []byte("url(")) {
		t.Errorf("%d bytes, or it needs more than this file", len(svg))
	}
}
