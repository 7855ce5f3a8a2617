package wakeup

import (
	"context"
	"errors"
	"io"
	"testing"
)

// closer counts its Close.
type closer struct{ closed int }

func (c *closer) Close() error {
	c.closed++
	return nil
}

func TestFirstClosesTheOtherResults(t *testing.T) {
	var all [3]closer
	first, err := First(t.Context(), len(all), func(_ context.Context, n int) (io.Closer, error) {
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
	c, err := First(t.Context(), len(failures), func(_ context.Context, n int) (io.Closer, error) { return nil, failures[n] })
	if c != nil || !errors.Is(err, failures[0]) || !errors.Is(err, failures[1]) {
		t.Errorf("got %v, %v", c, err)
	}
}
