package transport

import (
	"cmp"
	"context"
	"io"
	"maps"
	"slices"
	"time"
)

// Measure is the speed of a transport, measured on an otherwise idle link.
type Measure struct {
	RTT  time.Duration // the least of a few pings
	Echo float64       // bytes a second that went there and back, the most of a few times
}

const (
	// The prober repeats a measurement while it is quick: a busy processor makes a transport look slower than it is,
	// never faster. A single measurement was off by up to three times while a laptop connected.
	pings        = 5
	echoBytes    = 256 << 10
	measureAgain = 100 * time.Millisecond // repeat until this long after the first began
	measureMost  = 8                      // repetitions
	measureTime  = 3 * time.Second        // the timeout for one transport
)

// fastest returns the measurement with the shortest time.
func fastest(got map[path]Measure) Measure {
	return slices.MinFunc(slices.Collect(maps.Values(got)), func(a, b Measure) int {
		return cmp.Compare(a.time(), b.time())
	})
}

// atLeast reports whether a ping and an echo take no longer with m than with o. A tenth longer still counts as equal:
// of two equal transports the preferred one wins, which costs the cluster less. It compares the sum, because round trip
// and rate disagree when the session uses all the bandwidth: queues are longest where most bytes get through.
func (m Measure) atLeast(o Measure) bool { return 10*m.time() <= 11*o.time() }

func (m Measure) time() time.Duration {
	if m.Echo == 0 {
		return measureTime // nothing came back in time
	}
	return m.RTT + time.Duration(echoBytes/m.Echo*float64(time.Second))
}

// measure measures the transport that the prober's link is on.
func (pr *prober) measure(ctx context.Context) (Measure, error) {
	ctx, cancel := context.WithTimeout(ctx, measureTime)
	defer cancel()
	var best Measure
	began := time.Now()
	for n := 0; n == 0 || n < measureMost && time.Since(began) < measureAgain; n++ {
		for range pings {
			rtt, err := pr.link.roundTrip(ctx)
			if err != nil {
				return Measure{}, err
			}
			if best.RTT == 0 || rtt < best.RTT {
				best.RTT = rtt
			}
		}
		echo, err := pr.echo(ctx)
		if err != nil {
			return Measure{}, err
		}
		best.Echo = max(best.Echo, echo)
	}
	return best, nil
}

// echo sends echoBytes to the manager and back, and returns the rate in bytes per second.
func (pr *prober) echo(ctx context.Context) (float64, error) {
	st, err := pr.session.openOn(ctx, pr.link, Request{Proto: ProtoMeter}, false)
	if err == nil {
		st, err = pr.session.opened(ctx, st)
	}
	if err != nil {
		return 0, err
	}
	defer st.Reset()
	stop := context.AfterFunc(ctx, func() { st.Reset() })
	defer stop()
	began := time.Now()
	written := make(chan error, 1)
	go func() {
		_, err := st.Write(make([]byte, echoBytes))
		written <- err
	}()
	n, err := io.CopyN(io.Discard, st, echoBytes)
	took := time.Since(began)
	if err != nil {
		st.Reset()
	}
	// A slow transport does not echo everything in time.
	if err := cmp.Or(err, <-written); err != nil && ctx.Err() == nil {
		return 0, err
	}
	return float64(n) / took.Seconds(), nil
}
