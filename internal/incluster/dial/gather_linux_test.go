package dial

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestOnlyFastFlowsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gatherer{most: 20}
		time.Sleep(time.Second)
		for i := range 30 {
			g.count()
			want := i+1 >= gatherFrom && i+1 <= g.most
			if got := g.pause(); (got > 0) != want || got > gatherTime {
				t.Errorf("%d reads: pause %v", i+1, got)
			}
		}
		time.Sleep(gatherTime)
		if got := g.pause(); got > 0 {
			t.Errorf("pause after the fast flow: %v", got)
		}
		g.count()
		if got := g.pause(); got > 0 {
			t.Errorf("pause after one read: %v", got)
		}
	})
}
