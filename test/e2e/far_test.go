//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// farSuite checks that a small message does not wait behind downloads if the cluster is far away. Without a limit on
// the data in flight it takes nine times as long as alone, so the check does not need a quiet machine.
func farSuite(t *testing.T, w *world) {
	stop, err := w.Stretch(lab.Line{RTT: 60 * time.Millisecond, Rate: 100e6})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	pod := w.pods(t, "default", "app=web")[0]
	echo := w.dialPod(t, pod, "9001")
	alone := medianRoundTrip(t, echo)

	var moved atomic.Int64
	for range 8 { // so that each link of the session carries one
		download := w.dialPod(t, pod, "9003")
		go func() { _, _ = io.Copy(counter{&moved}, download) }()
	}
	for queued := int64(40 << 20); moved.Load() < queued; { // the whole of a slow start, and more than any buffer holds
		select {
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
	// Other tests may use the processors for seconds, so retry. Without the limit, no attempt succeeds.
	testenv.Eventually(t, time.Minute, func() error {
		before := moved.Load()
		beside := medianRoundTrip(t, echo)
		t.Logf("1 byte there and back: %v alone, %v beside eight downloads", alone, beside)
		if moved.Load() == before {
			return errors.New("the downloads have stalled")
		}
		if beside > 4*alone {
			return fmt.Errorf("1 byte takes %v there and back beside eight downloads, and %v alone", beside, alone)
		}
		return nil
	})
}

// counter counts what is written to it.
type counter struct{ *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.Add(int64(len(b)))
	return len(b), nil
}

// dialPod connects the laptop to a pod until the test ends.
func (w *world) dialPod(t *testing.T, pod netip.Addr, port string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := w.Dial(ctx, "laptop", "tcp", net.JoinHostPort(pod.String(), port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// medianRoundTrip sends a byte and waits for it, 25 times.
func medianRoundTrip(t *testing.T, c net.Conn) time.Duration {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	took := make([]time.Duration, 25)
	b := []byte{1}
	for i := range took {
		began := time.Now()
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return took[len(took)/2]
}
