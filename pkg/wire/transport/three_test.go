package transport_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/pkg/wire/transport"
)

// threeTransports are twoTransports with another transport before the preferred one.
type threeTransports struct {
	*twoTransports
	first fakeTransport

	statusMu sync.Mutex
	status   []transport.PreferredStatus
}

func newThreeTransports(t *testing.T, fallback, preferred, first time.Duration) *threeTransports {
	r := &threeTransports{twoTransports: newTwoTransports(t, fallback, preferred)}
	r.first.n, r.first.delay = r.network, first
	return r
}

func (r *threeTransports) start(t *testing.T) *rig {
	return start(t, r.network, transport.ClientConfig{
		Dial:      r.fallback.Dial,
		Preferred: []func(context.Context) (net.Conn, error){r.first.Dial, r.preferred.Dial},
		OnPreferred: func(s []transport.PreferredStatus) {
			r.statusMu.Lock()
			defer r.statusMu.Unlock()
			r.status = s
		},
	}, transport.ServerConfig{})
}

// are waits until the first and the preferred transport have these states, and then lets links move.
func (r *threeTransports) are(t *testing.T, within time.Duration, first, preferred transport.PreferredState) {
	t.Helper()
	r.await(t, within, func(got []transport.PreferredStatus) bool {
		return got[0].State == first && got[1].State == preferred
	})
}

// uses waits until a transport is in use: 0 the fallback, 1 the first, 2 the preferred one.
func (r *threeTransports) uses(t *testing.T, within time.Duration, want int) {
	t.Helper()
	r.await(t, within, func(got []transport.PreferredStatus) bool {
		return want == 1+slices.IndexFunc(got, func(s transport.PreferredStatus) bool { return s.State == inUse })
	})
}

func (r *threeTransports) await(t *testing.T, within time.Duration, are func([]transport.PreferredStatus) bool) {
	t.Helper()
	var got []transport.PreferredStatus
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		r.statusMu.Lock()
		got = r.status
		r.statusMu.Unlock()
		if len(got) == 2 && are(got) {
			time.Sleep(200 * time.Millisecond)
			return
		}
	}
	t.Fatalf("the transports are %+v", got)
}

// carriedBy checks that one transport carries the session: 0 the fallback, 1 the first, 2 the preferred one.
func carriedBy(t *testing.T, s *transport.Session, want int) {
	t.Helper()
	sent := func() []uint64 {
		st := s.Stats()
		return []uint64{st.Fallback.Sent, st.Preferred[0].Sent, st.Preferred[1].Sent}
	}
	before := sent()
	time.Sleep(time.Second)
	after := sent()
	for i := range after {
		if moved := after[i]-before[i] > 100<<10; moved != (i == want) {
			t.Errorf("transport %d carries the session: %v, want transport %d", i, moved, want)
		}
	}
}

const (
	inUse   = transport.PreferredInUse
	standby = transport.PreferredStandby
	failing = transport.PreferredFailing
)

func TestFirstOfThreeThatWorksIsUsed(t *testing.T) {
	refused := errors.New("refused")
	for name, tt := range map[string]struct {
		first, preferred           error
		firstState, preferredState transport.PreferredState
		want                       int
	}{
		"all_work":        {nil, nil, inUse, standby, 1},
		"first_alone":     {nil, refused, inUse, failing, 1},
		"preferred_alone": {refused, nil, failing, inUse, 2},
		"neither":         {refused, refused, failing, failing, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newThreeTransports(t, time.Millisecond, 2*time.Millisecond, 3*time.Millisecond)
				r.first.change(tt.first)
				r.preferred.change(tt.preferred)
				rig := r.start(t)
				r.are(t, 10*time.Second, tt.firstState, tt.preferredState)
				stop := exchange(t, rig)
				carriedBy(t, rig.laptop, tt.want)
				stop()
				measured := rig.laptop.Stats().Preferred
				r.statusMu.Lock()
				defer r.statusMu.Unlock()
				for i, s := range r.status {
					if works := s.State != failing; works != (measured[i].RTT > 0) || works != (s.Reason == nil) || s.Since.IsZero() {
						t.Errorf("transport %d: %+v, round trip %v", i+1, s, measured[i].RTT)
					}
				}
			})
		})
	}
}

// When the transport in use fails, the links use the fallback, and soon the next that works. They return when the first
// works again. Streams notice nothing.
func TestStreamsSurviveAllSwitchesOfThree(t *testing.T) {
	for name, breaks := range map[string]func(r *fakeTransport, broken bool){
		"refused": func(r *fakeTransport, broken bool) {
			var err error
			if broken {
				err = errors.New("refused")
			}
			r.change(err)
		},
		"black_hole": func(r *fakeTransport, broken bool) { r.hole(broken) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newThreeTransports(t, 3*time.Millisecond, 2*time.Millisecond, time.Millisecond)
				rig := r.start(t)
				stop := exchange(t, rig)
				r.are(t, 10*time.Second, inUse, standby)
				carriedBy(t, rig.laptop, 1)

				breaks(&r.first, true)
				r.uses(t, time.Minute, 2)
				carriedBy(t, rig.laptop, 2)

				breaks(&r.preferred, true)
				r.uses(t, 2*time.Minute, 0)
				carriedBy(t, rig.laptop, 0)

				breaks(&r.preferred, false)
				r.uses(t, 5*time.Minute, 2)
				carriedBy(t, rig.laptop, 2)

				breaks(&r.first, false)
				r.uses(t, 5*time.Minute, 1)
				carriedBy(t, rig.laptop, 1)
				stop()
			})
		})
	}
}

// While a preferred transport is in use, one before it is tried again, at once when the network changes, and none after
// it.
func TestBetterTransportIsTriedWhileAnotherIsInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newThreeTransports(t, 3*time.Millisecond, time.Millisecond, 2*time.Millisecond)
		r.first.change(errors.New("refused"))
		rig := r.start(t)
		r.are(t, 10*time.Second, failing, inUse)
		before := r.preferred.dialed()
		time.Sleep(time.Hour)
		if n := r.first.dialed(); n < 55 || n > 100 {
			t.Errorf("the first transport was dialed %d times in an hour", n)
		}
		if n := r.preferred.dialed() - before; n > 0 {
			t.Errorf("the transport in use was dialed %d times in an hour", n)
		}
		r.first.change(nil)
		rig.client.Retry()
		r.are(t, 5*time.Second, inUse, standby)
		before = r.preferred.dialed()
		time.Sleep(time.Hour)
		if n := r.preferred.dialed() - before; n > 0 {
			t.Errorf("the transport after the one in use was dialed %d times", n)
		}
		stop := exchange(t, rig)
		carriedBy(t, rig.laptop, 1)
		stop()
	})
}

// A transport before the one in use is used as soon as it works, while one after it is still tried.
func TestFirstIsUsedBeforeTheNextIsTried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newThreeTransports(t, time.Millisecond, time.Millisecond, time.Millisecond)
		r.preferred.hole(true)
		r.start(t)
		r.are(t, 5*time.Second, inUse, transport.PreferredTrying)
		r.are(t, time.Minute, inUse, failing)
	})
}

// After Retry, the pauses begin again from the shortest: what changed may need a moment.
func TestRetryShortensPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newThreeTransports(t, time.Millisecond, time.Millisecond, time.Millisecond)
		r.first.change(errors.New("refused"))
		rig := r.start(t)
		time.Sleep(time.Hour)
		r.are(t, time.Second, failing, inUse)
		rig.client.Retry()
		time.Sleep(500 * time.Millisecond)
		r.first.change(nil)
		r.are(t, 5*time.Second, inUse, standby)
	})
}

// However often Retry is called, a transport is tried at most once in a second.
func TestRetriesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newThreeTransports(t, time.Millisecond, time.Millisecond, time.Millisecond)
		r.first.change(errors.New("refused"))
		rig := r.start(t)
		r.are(t, 10*time.Second, failing, inUse)
		before := r.first.dialed()
		for range 1000 {
			time.Sleep(20 * time.Millisecond)
			rig.client.Retry()
		}
		if n := r.first.dialed() - before; n < 10 || n > 21 {
			t.Errorf("dialed %d times in 20 s", n)
		}
	})
}

// A stuck transport is left while the prober tries another one that does not answer.
func TestStuckTransportIsLeftDuringATry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newThreeTransports(t, 3*time.Millisecond, time.Millisecond, time.Millisecond)
		r.first.hole(true)
		rig := r.start(t)
		stop := exchange(t, rig)
		r.are(t, time.Minute, failing, inUse)
		for tried := r.first.dialed(); r.first.dialed() == tried; {
			time.Sleep(10 * time.Millisecond)
		}
		r.preferred.hole(true)
		time.Sleep(2 * time.Second)
		carriedBy(t, rig.laptop, 0)
		stop()
	})
}
