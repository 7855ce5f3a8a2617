//go:build e2e && linux

package e2e

import (
	"slices"
	"testing"
	"time"

	"kubevpn/test/lab"
)

// maxRoundTrips is what a connect may take: 9, and what a busy machine adds to the measurement.
const maxRoundTrips = 12

// roundTripsSuite counts the round trips of a connect: by how much the connect takes longer if the cluster is farther
// away. What the machine itself takes is in both measurements.
func roundTripsSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t) // installs the manager, or a gateway
	const near, far = 20 * time.Millisecond, 400 * time.Millisecond
	trips := float64(fastestConnect(t, l, far)-fastestConnect(t, l, near)) / float64(far-near)
	t.Logf("a connect takes %.1f round trips", trips)
	if trips > maxRoundTrips {
		t.Errorf("a connect takes %.1f round trips to the API server, want at most %d", trips, maxRoundTrips)
	}
}

// fastestConnect returns what the fastest of three connects takes over a line: other work on the machine only adds.
func fastestConnect(t *testing.T, l *laptop, roundTrip time.Duration) time.Duration {
	t.Helper()
	l.must(t, "kubevpn", "disconnect", "--all")
	stop, err := l.Stretch(lab.Line{RTT: roundTrip})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}()
	var all []time.Duration
	for range 3 {
		r := l.run(t, "kubevpn", "connect")
		if r.code != 0 {
			t.Fatal(r)
		}
		all = append(all, r.took)
		l.must(t, "kubevpn", "disconnect", "--all")
	}
	t.Logf("at %v: %v", roundTrip, all)
	return slices.Min(all)
}
