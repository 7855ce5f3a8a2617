package l3

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// pair is a Sender in a bubble whose lanes are pipes, and what comes out of them, in order.
type pair struct {
	*rig
	ends      [Lanes]net.Conn // what is received from
	hold      [Lanes]chan struct{}
	delivered chan []byte
	ended     [Lanes]chan error
}

// held is a lane from which nothing can be read until it is let go.
type held struct {
	net.Conn
	open <-chan struct{}
}

func (h held) Read(b []byte) (int, error) { <-h.open; return h.Conn.Read(b) }

func newPair(t *testing.T) *pair {
	p := &pair{delivered: make(chan []byte, 100)}
	var barriers Barriers
	var malformed atomic.Uint64
	p.rig = newRig(t, SenderConfig{GSO: true, Eager: true, Open: func(_ context.Context, lane int) (io.WriteCloser, error) {
		here, there := net.Pipe()
		hold, ended := make(chan struct{}), make(chan error, 1)
		p.mu.Lock()
		p.ends[lane], p.hold[lane], p.ended[lane] = there, hold, ended
		p.mu.Unlock()
		go func() {
			defer there.Close()
			ended <- Receive(held{there, hold}, lane, &barriers, func(f *Frame) {
				p.delivered <- bytes.Clone(f.Bytes())
				f.Release()
			}, &malformed)
		}()
		return here, nil
	}})
	t.Cleanup(func() {
		if n := malformed.Load(); n > 0 {
			t.Errorf("%d malformed", n)
		}
	})
	return p
}

// leave runs the Sender, and has bulkFlow send 60001 bytes by lane 0, which makes it leave that, and 60002 by its lane.
func (p *pair) leave() (bulk int) {
	p.run()
	synctest.Wait()
	p.send(bulkFlow.of(60001))
	p.send(bulkFlow.of(60002))
	return p.laneOf(bulkFlow)
}

// got gives what was delivered since it was asked last, as the lengths of payloads.
func (p *pair) got() (payloads []int) {
	synctest.Wait()
	for len(p.delivered) > 0 {
		payloads = append(payloads, len(<-p.delivered)-len(spec{}.bytes()))
	}
	return payloads
}

func (p *pair) want(payloads ...int) {
	p.t.Helper()
	if got := p.got(); !slices.Equal(got, payloads) {
		p.t.Errorf("payloads %v were delivered, want %v", got, payloads)
	}
}

// let lets the lane be read from.
func (p *pair) let(lane int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.hold[lane]:
	default:
		close(p.hold[lane])
	}
}

// cut ends the lane for both ends, and gives what tells of the end of Receive.
func (p *pair) cut(lane int) <-chan error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ends[lane].Close()
	return p.ended[lane]
}

// release lets go of all lanes that are still held, and ends the Sender.
func (p *pair) release() {
	for lane := range Lanes {
		p.let(lane)
	}
	p.end()
	synctest.Wait()
}

// A flow that leaves lane 0 does not overtake what it has sent there, however late lane 0 is.
func TestFlowDoesNotOvertakeItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t)
		bulk := p.leave()
		defer p.release()
		p.let(bulk)
		time.Sleep(time.Hour)
		p.want()
		p.let(0)
		p.want(60001, 60002)
		p.send(bulkFlow.of(60003)) // no barrier: it has left
		p.want(60003)
	})
}

// What waits for lane 0 goes on when that has ended: what it had is lost. The next lane 0 says so to who waits later.
func TestBarrierOutlivesItsLane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t)
		bulk := p.leave()
		defer p.release()
		p.let(bulk)
		p.want()
		lost := p.cut(0)
		p.let(0)
		if err := <-lost; err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
		p.want(60002)
		time.Sleep(maxPause) // until there is another
		p.send(bulkFlow.of(60003))
		p.want(60003)
	})
}

func TestBarrierThatWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t)
		bulk := p.leave()
		defer p.release()
		p.cut(0)
		p.let(0)
		time.Sleep(maxPause)
		p.let(bulk) // comes to its barrier when the lane that had the other part has gone
		p.want()
		p.let(0) // of another lane 0
		p.want(60002)
	})
}

func TestBarriers(t *testing.T) {
	passed := newBarrier(barrierPassed, 7).Bytes()
	awaited := newBarrier(barrierAwaited, 7).Bytes()
	packet := spec{payload: 1}.bytes()
	tests := []struct {
		name      string
		number    int
		before    uint32 // passed
		lane      []byte
		frames    int
		malformed uint64
		waits     bool
	}{
		{"lane_0_passes", 0, 0, wire(packet, passed, packet), 2, 0, false},
		{"lane_0_does_not_wait_for_itself", 0, 0, wire(awaited, packet), 1, 0, false},
		{"another_waits", 1, 6, wire(packet, awaited, packet), 1, 0, true},
		{"passed_already", 1, 7, wire(packet, awaited, packet), 2, 0, false},
		{"a_later_one_was_passed", 1, 9, wire(awaited, packet), 1, 0, false},
		{"numbers_wrap", 1, 3, wire(newBarrier(barrierAwaited, 1<<32-5).Bytes(), packet), 1, 0, false},
		{"only_lane_0_passes", 1, 6, wire(passed, awaited, packet), 0, 0, true},
		{"unknown_kind", 1, 0, wire(newBarrier(3, 7).Bytes(), packet), 1, 1, false},
		{"longer", 1, 0, wire(append(bytes.Clone(awaited), 0), packet), 1, 1, false},
		{"with_a_header", 1, 0, wire(append([]byte{1}, awaited[1:]...), packet), 1, 1, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var barriers Barriers
				var malformed, frames atomic.Uint64
				barriers.begin() // there is a lane 0
				barriers.pass(tt.before)
				done := make(chan error, 1)
				go func() {
					done <- Receive(bytes.NewReader(tt.lane), tt.number, &barriers, func(f *Frame) { frames.Add(1); f.Release() }, &malformed)
				}()
				synctest.Wait()
				if waits := len(done) == 0; waits != tt.waits || int(frames.Load()) != tt.frames || malformed.Load() != tt.malformed {
					t.Errorf("waits %v, %d frames, %d malformed", waits, frames.Load(), malformed.Load())
				}
				barriers.end()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Another Sender counts from the beginning.
func TestBarriersBeginAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var barriers Barriers
		barriers.begin()
		barriers.pass(9)
		old := make(chan struct{})
		go func() { barriers.await(10); close(old) }()
		synctest.Wait()
		barriers.end()
		barriers.begin()
		<-old
		latest := make(chan struct{})
		go func() { barriers.await(1); close(latest) }()
		synctest.Wait()
		select {
		case <-latest:
			t.Error("what the last Sender has passed counts for the next")
		default:
		}
		barriers.pass(1)
		<-latest
	})
}
