//go:build e2e && linux

package e2e

import (
	"slices"
	"testing"
	"time"

	"kubevpn/test/lab"
)

// maxRoundTrips is the limit for a connect: 9 round trips, and a margin for a busy machine.
const maxRoundTrips = 12

// roundTripsSuite counts the round trips of a connect. It compares how long connects to a near and to a far cluster
// take. Both measurements contain the time that the machine itself needs.
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

// fastestConnect returns the time of the fastest of three connects over a line, because other load only adds time.
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
