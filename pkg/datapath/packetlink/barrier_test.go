package packetlink

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

// pair is a Sender in a bubble, whose streams are pipes, and the frames that it delivered, in order.
type pair struct {
	*rig
	ends      [Streams]net.Conn // the ends that Receive reads
	hold      [Streams]chan struct{}
	delivered chan []byte
	ended     [Streams]chan error
}

// held is a stream whose reads block until it is released.
type held struct {
	net.Conn
	open <-chan struct{}
}

func (h held) Read(b []byte) (int, error) { <-h.open; return h.Conn.Read(b) }

func newPair(t *testing.T) *pair {
	p := &pair{delivered: make(chan []byte, 100)}
	var barriers Barriers
	var malformed atomic.Uint64
	p.rig = newRig(t, SenderConfig{GSO: true, Eager: true, Open: func(_ context.Context, stream int) (io.WriteCloser, error) {
		here, there := net.Pipe()
		hold, ended := make(chan struct{}), make(chan error, 1)
		p.mu.Lock()
		p.ends[stream], p.hold[stream], p.ended[stream] = there, hold, ended
		p.mu.Unlock()
		go func() {
			defer there.Close()
			ended <- Receive(held{there, hold}, stream, &barriers, DeliverFunc(func(f *Frame) {
				p.delivered <- bytes.Clone(f.Bytes())
				f.Release()
			}), &malformed)
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

// leave runs the Sender and sends two frames of bulkFlow: 60001 bytes by stream 0, and 60002 bytes by a bulk stream, whose
// number it returns.
func (p *pair) leave() (bulk int) {
	p.run()
	synctest.Wait()
	p.send(bulkFlow.of(60001))
	p.send(bulkFlow.of(60002))
	return p.streamOf(bulkFlow)
}

// got returns the lengths of the payloads that were delivered since its last call.
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

// let releases the reads of the stream.
func (p *pair) let(stream int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.hold[stream]:
	default:
		close(p.hold[stream])
	}
}

// cut ends the stream for both ends, and returns the channel that reports the end of Receive.
func (p *pair) cut(stream int) <-chan error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ends[stream].Close()
	return p.ended[stream]
}

// release releases the reads of all streams, and ends the Sender.
func (p *pair) release() {
	for stream := range Streams {
		p.let(stream)
	}
	p.end()
	synctest.Wait()
}

// A flow that leaves stream 0 does not overtake its earlier frames there, however late stream 0 is.
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
		p.send(bulkFlow.of(60003)) // no barrier: the flow has left already
		p.want(60003)
	})
}

// A stream that waits for stream 0 continues when stream 0 has ended and lost its frames. The next stream 0 repeats the
// barrier for streams that wait later.
func TestBarrierOutlivesItsStream(t *testing.T) {
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
		time.Sleep(maxPause) // until the Sender has opened another
		p.send(bulkFlow.of(60003))
		p.want(60003)
	})
}

func TestLostBarrierIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t)
		bulk := p.leave()
		defer p.release()
		p.cut(0)
		p.let(0)
		time.Sleep(maxPause)
		p.let(bulk) // reaches its barrier after the stream with the other part has ended
		p.want()
		p.let(0) // the next stream 0
		p.want(60002)
	})
}

func TestStreamsWaitForBarriers(t *testing.T) {
	passed := newBarrier(barrierPassed, 7).Bytes()
	awaited := newBarrier(barrierAwaited, 7).Bytes()
	packet := spec{payload: 1}.bytes()
	tests := []struct {
		name      string
		number    int
		before    uint32 // passed
		stream    []byte
		frames    int
		malformed uint64
		waits     bool
	}{
		{"stream_0_passes", 0, 0, wire(packet, passed, packet), 2, 0, false},
		{"stream_0_does_not_wait_for_itself", 0, 0, wire(awaited, packet), 1, 0, false},
		{"another_waits", 1, 6, wire(packet, awaited, packet), 1, 0, true},
		{"passed_already", 1, 7, wire(packet, awaited, packet), 2, 0, false},
		{"a_later_one_was_passed", 1, 9, wire(awaited, packet), 1, 0, false},
		{"numbers_wrap", 1, 3, wire(newBarrier(barrierAwaited, 1<<32-5).Bytes(), packet), 1, 0, false},
		{"only_stream_0_passes", 1, 6, wire(passed, awaited, packet), 0, 0, true},
		{"unknown_kind", 1, 0, wire(newBarrier(3, 7).Bytes(), packet), 1, 1, false},
		{"longer", 1, 0, wire(append(bytes.Clone(awaited), 0), packet), 1, 1, false},
		{"with_a_header", 1, 0, wire(append([]byte{1}, awaited[1:]...), packet), 1, 1, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var barriers Barriers
				var malformed, frames atomic.Uint64
				barriers.begin() // there is a stream 0
				barriers.pass(tt.before)
				done := make(chan error, 1)
				go func() {
					done <- Receive(bytes.NewReader(tt.stream), tt.number, &barriers, DeliverFunc(func(f *Frame) { frames.Add(1); f.Release() }), &malformed)
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

// The barriers of another Sender count from 1 again.
func TestBarriersRestartWithStreamZero(t *testing.T) {
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
			t.Error("the barriers of the last Sender count for the next one")
		default:
		}
		barriers.pass(1)
		<-latest
	})
}
