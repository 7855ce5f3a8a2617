package term

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

func TestPlainProgressPrintsEachStepOnce(t *testing.T) {
	at := func(seconds float64) time.Time {
		return time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC).Add(time.Duration(seconds * float64(time.Second)))
	}
	events := []api.Event{
		{Time: at(0), Step: "Installing"},
		{Time: at(1), Step: "Installing", Detail: "pulling"},
		{Time: at(2), Step: "Installing", Detail: "pulling"}, // nothing new
		{Time: at(4.2), Step: "Installing", Detail: "ready", Done: true},
		{Time: at(4.3), Step: "Opening"},
		{Time: at(4.4), Warning: "half of it is missing"},
		{Time: at(4.5), Step: "Opening", Done: true},
		{Time: at(5), Step: "Opening", Detail: "again", Done: true},
		{Time: at(6), Connection: &api.Connection{}},
		{Time: at(7), Step: "Finding"},
		{Time: at(7), Step: "Part of it"},
		{Time: at(9), Step: "Part of it", Done: true},
		{Time: at(10), Step: "Finding", Done: true},
	}
	var out bytes.Buffer
	p := &lines{w: &out}
	for _, e := range events {
		p.Show(e)
	}
	want := "Installing\nInstalling: pulling\n✓ Installing: ready (4.2s)\nOpening\n! half of it is missing\n✓ Opening\n✓ Opening: again\n" +
		"Finding\nPart of it\n✓ Part of it (2.0s)\n✓ Finding (3.0s)\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSpinnerCutsTheCurrentStepAndPrintsTheWholeResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out testenv.Buffer
		s := &spinner{lines: lines{w: &out}, screen: &out, width: func() int { return 20 }}
		s.Show(api.Event{Step: "Installing the traffic manager"})
		time.Sleep(spinnerPeriod)
		synctest.Wait()
		if got, want := out.String(), "\r\x1b[K⠋ Installing the t…\r\x1b[K⠙ Installing the t…"; got != want {
			t.Errorf("output = %q, want %q", got, want)
		}
		s.Show(api.Event{Step: "Installing the traffic manager", Done: true})
		s.Stop()
		s.Stop()
		if got := strings.TrimSuffix(out.String(), "\r\x1b[K"); !strings.HasSuffix(got, "\r\x1b[K✓ Installing the traffic manager\n") {
			t.Errorf("output = %q, want the whole step last", got)
		}
	})
}
