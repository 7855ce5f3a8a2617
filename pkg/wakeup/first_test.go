package wakeup

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// closer counts its Close.
type closer struct{ closed int }

func (c *closer) Close() error {
	c.closed++
	return nil
}

func TestFirstClosesTheOtherResults(t *testing.T) {
	var all [3]closer
	first, err := First(t.Context(), len(all), 0, func(_ context.Context, n int) (io.Closer, error) {
		return &all[n], nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for n := range all {
		want := 1
		if &all[n] == first {
			want = 0
		}
		if all[n].closed != want {
			t.Errorf("result %d was closed %d times", n, all[n].closed)
		}
	}
}

func TestFirstReturnsAllErrors(t *testing.T) {
	failures := []error{errors.New("one"), errors.New("two")}
	c, err := First(t.Context(), len(failures), 0, func(_ context.Context, n int) (io.Closer, error) { return nil, failures[n] })
	if c != nil || !errors.Is(err, failures[0]) || !errors.Is(err, failures[1]) {
		t.Errorf("got %v, %v", c, err)
	}
}

func TestFirstBeginsTheNextCallAfterAFailureOrItsPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		at := [4]time.Duration{3: -1}
		c, err := First(t.Context(), 4, time.Second, func(ctx context.Context, n int) (io.Closer, error) {
			at[n] = time.Since(began)
			switch n {
			case 0:
				return nil, errors.New("refused")
			case 1:
				<-ctx.Done() // silent
				return nil, ctx.Err()
			}
			return &closer{}, nil
		})
		if want := [4]time.Duration{0, 0, time.Second, -1}; c == nil || err != nil || at != want {
			t.Errorf("%v, %v; calls began after %v, want %v", c, err, at, want)
		}
	})
}
