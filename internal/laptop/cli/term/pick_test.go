//go:build unix

package term

import (
	"context"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// picking starts Pick on a terminal, types keys when the list is shown, and returns what Pick returns. It calls shown,
// unless that is nil, instead of typing.
func picking(t *testing.T, ctx context.Context, keys string, shown func()) (picked string, err error) {
	t.Helper()
	t.Setenv("TERM", "xterm-256color")
	person, terminal, err := pty.Open() // not closed: a goroutine of Bubble Tea may still ask for the size
	if err != nil {
		t.Fatal(err)
	}
	before, err := term.GetState(int(terminal.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	s := Streams{In: terminal, Out: nil, Errout: &Cleaner{W: terminal}}
	if !s.CanPick() {
		t.Fatal("a terminal is none")
	}
	var screen testenv.Buffer
	go io.Copy(&screen, person)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		picked, err = s.Pick(ctx, "Pick one", []string{"deployment/api\tdescribed", "deployment/web", "statefulset/web", "pod/j\x1back"})
	}()
	testenv.Eventually(t, 10*time.Second, func() error {
		if text := screen.String(); !strings.Contains(text, "pod/jack") || !strings.Contains(text, "deployment/api described") {
			return fmt.Errorf("the list is not shown: %q", text)
		}
		return nil
	})
	if shown != nil {
		shown()
	} else if _, err := io.WriteString(person, keys); err != nil {
		t.Fatal(err)
	}
	<-ended
	testenv.Eventually(t, 10*time.Second, func() error {
		if text := screen.String(); !strings.Contains(text, "\x1b[?25h") {
			return fmt.Errorf("the cursor was not restored: %q", text)
		}
		return nil
	})
	if text := screen.String(); strings.Contains(text, "\x1b[?2004h") {
		t.Errorf("a pasted text is no keys: %q", text)
	}
	if after, err := term.GetState(int(terminal.Fd())); err != nil || !reflect.DeepEqual(before, after) {
		t.Errorf("the terminal was not restored: %v, %v, want %v", err, after, before)
	}
	return picked, err
}

func TestUserPicksWhatIsShown(t *testing.T) {
	const up, down, backspace = "\x1b[A", "\x1b[B", "\x7f"
	for keys, want := range map[string]string{
		"\r":                       "deployment/api",
		"WEB\r":                    "deployment/web",
		"web" + down + "\r":        "statefulset/web",
		down + down + up + "\r":    "deployment/web",
		"jk" + backspace + "ack\r": "pod/jack", // no key of vi moves in the list
		"t/\r":                     "deployment/api",
		// There is no match, so neither ↑ nor Enter has an effect.
		"zz" + up + "\r" + strings.Repeat(backspace, 2) + "pod\r": "pod/jack",
	} {
		if got, err := picking(t, t.Context(), keys, nil); got != want || err != nil {
			t.Errorf("%q: got %q, %v, want %s", keys, got, err, want)
		}
	}
}

func TestUserCancelsTheList(t *testing.T) {
	for _, key := range []string{"\x1b", "\x03", "web\x1b", "zz\x1b"} {
		got, err := picking(t, t.Context(), key, nil)
		if e := api.AsError(err); err == nil || e.Code != api.ExitInterrupted {
			t.Errorf("%q: got %q, %v", key, got, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	if got, err := picking(t, ctx, "", cancel); err == nil || AsError(ctx, err).Code != api.ExitInterrupted {
		t.Errorf("the context ended: got %q, %v", got, err)
	}
}
