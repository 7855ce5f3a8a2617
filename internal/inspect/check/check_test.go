package check

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// none are the facts of checks that need none.
type none struct{}

func TestFindingsComeInTheOrderOfTheList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		after := func(d time.Duration) func(context.Context, none) api.Finding {
			return func(context.Context, none) api.Finding {
				time.Sleep(d)
				return OK("done")
			}
		}
		var told []string
		got := Run(t.Context(), none{}, []Check[none]{
			{"s", "slow", "", after(2 * time.Second)}, {"s", "needs fast", "fast", after(time.Second)},
			{"s", "fast", "", after(0)},
		}, func(f api.Finding) { told = append(told, f.Name) })
		if want := []string{"slow", "needs fast", "fast"}; !slices.Equal(told, want) {
			t.Errorf("told of %q, want %q", told, want)
		}
		if got[0].Seconds != 2 || got[1].Seconds != 1 || got[2].Section != "s" {
			t.Errorf("%+v", got)
		}
	})
}

func TestCheckIsSkippedIfWhatItNeedsFailed(t *testing.T) {
	fail := func(context.Context, none) api.Finding { return Failed(api.ExitKubeconfig, "no") }
	never := func(context.Context, none) api.Finding { panic("it needs a check that failed") }
	got := Run(t.Context(), none{}, []Check[none]{{"s", "first", "", fail}, {"s", "second", "first", never}, {"s", "third", "second", never}}, nil)
	for _, f := range got[1:] {
		if f.Verdict != api.VerdictSkipped || f.Seen != `the check "first" failed` {
			t.Errorf("%+v", f)
		}
	}
}

func TestHangingCheckIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		got := Run(t.Context(), none{}, []Check[none]{{"s", "deaf", "", func(context.Context, none) api.Finding {
			<-release
			return OK("late")
		}}}, nil)
		close(release)
		if f := got[0]; f.Verdict != api.VerdictFailed || !strings.Contains(f.Cause, "did not end within 20s") {
			t.Errorf("%+v", f)
		}
	})
}

func TestInterruptSkipsWhatHasNotEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	got := Run(ctx, none{}, []Check[none]{{"s", "waits", "", func(ctx context.Context, _ none) api.Finding {
		cancel()
		<-ctx.Done()
		return Failed(api.ExitUnexpected, "%v", ctx.Err())
	}}}, nil)
	if got[0].Verdict != api.VerdictSkipped {
		t.Errorf("%+v", got[0])
	}
}

func TestTextsAreCleanAndBounded(t *testing.T) {
	long := "\x1b[31m\n" + strings.Repeat("x", 100_000)
	got := Run(t.Context(), none{}, []Check[none]{{"s", "long", "", func(context.Context, none) api.Finding {
		return Warning("%s", long).WithNotes(slices.Repeat([]string{long}, 100)...).WithFix("first\nsecond\u202e")
	}}}, nil)[0]
	if text := fmt.Sprint(got); strings.ContainsAny(text, "\x1b\u202e") || len(text) > 10_000 {
		t.Errorf("%d bytes: %q", len(text), text[:min(len(text), 1000)])
	}
	if got.Fix != "first\nsecond" || len(got.Notes) != maxNotes+1 || got.Notes[maxNotes] != fmt.Sprintf("and %d more", 100-maxNotes) {
		t.Errorf("fix %q, %d notes", got.Fix, len(got.Notes))
	}
}
