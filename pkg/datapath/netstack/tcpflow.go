package netstack

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/pkg/wakeup"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// copyLen is the size of one copy from gVisor to the stream.
	copyLen = 64 << 10
	// writeLen is the size of one write to gVisor, which fits in one super-packet. gVisor would split a longer piece
	// into a long and a short packet.
	writeLen = 62 << 10
	// resetGrace is the time for data that the application sent before its RST to enter the stream.
	resetGrace = time.Second
	// finPoll is the interval of the checks in awaitReset.
	finPoll = 50 * time.Millisecond

	keepAliveProbes = 5
)

// errAppGone ends the direction to an application that reset its connection, or that gVisor gave up.
var errAppGone = errors.New("the application's connection is gone")

// tcpFlow copies between gVisor's endpoint, where the application's connection ends, and the stream to the cluster.
//
//	up:   app ─ ep.Read ─ pooled buffer ─ stream.Write      FIN ─▶ CloseWrite   RST ─▶ Reset
//	down: stream ─ WriteTo ─ Write ─ ep.Write ─ app         EOF ─▶ Shutdown     ECONNRESET ─▶ Abort (RST)
//
// down runs in the flow's goroutine, which waits in the stream. up has a goroutine only while there is something to
// read: an idle flow holds neither a second goroutine stack nor a buffer. gVisor reports events to NotifyEvent, which
// starts up, wakes down, and passes on an RST that neither of them sees.
type tcpFlow struct {
	s      *Stack
	ep     tcpip.Endpoint
	stream Stream

	queue    waiter.Queue
	entry    waiter.Entry
	writable wakeup.Signal
	reader   bytes.Reader // the piece that Write is writing

	upState atomic.Int32
	upDone  chan struct{} // closed when up has ended
	finSent atomic.Bool   // the application was sent a FIN
	appGone atomic.Bool

	mu        sync.Mutex // never held while gVisor is called
	resetLate *time.Timer
	ended     bool
}

// States of the direction up.
//
//	        event              event
//	upIdle ───────▶ upRunning ───────▶ upAgain         upEnded: FIN or failure
//	   ▲  nothing to   │  ▲   nothing to  │
//	   └── read ───────┘  └─── read ──────┘
const (
	upIdle int32 = iota
	upRunning
	upAgain // an event arrived while up was running, so up must read again
	upEnded
)

// run carries the flow from the end of its handshake until both directions have ended.
func (f *tcpFlow) run() {
	f.s.stats.tcp.opened()
	defer f.s.stats.tcp.open.Add(-1)
	f.writable, f.upDone = wakeup.NewSignal(), make(chan struct{})
	f.entry.Init(f, waiter.ReadableEvents|waiter.WritableEvents|waiter.EventHUp|waiter.EventErr)
	f.queue.EventRegister(&f.entry)
	f.keepAlive()
	f.checkGone() // an RST or data may have arrived before EventRegister
	f.startUp()
	if f.down() {
		f.awaitReset()
	}
	<-f.upDone

	f.queue.EventUnregister(&f.entry)
	f.mu.Lock()
	f.ended = true
	if f.resetLate != nil {
		f.resetLate.Stop()
	}
	f.mu.Unlock()
	f.stream.Close()
	f.ep.Close()
}

// keepAlive makes gVisor detect an application that vanished without FIN or RST, for example in a container that lost
// its network.
func (f *tcpFlow) keepAlive() {
	idle := tcpip.KeepaliveIdleOption(f.s.cfg.KeepAliveIdle)
	interval := tcpip.KeepaliveIntervalOption(f.s.cfg.KeepAliveInterval)
	// These options cannot fail on a TCP endpoint.
	_ = f.ep.SetSockOpt(&idle)
	_ = f.ep.SetSockOpt(&interval)
	_ = f.ep.SetSockOptInt(tcpip.KeepaliveCountOption, keepAliveProbes)
	f.ep.SocketOptions().SetKeepAlive(true)
}

// NotifyEvent implements waiter.EventListener. gVisor may hold the endpoint's lock, so it only reads atomics.
func (f *tcpFlow) NotifyEvent(mask waiter.EventMask) {
	if mask&waiter.ReadableEvents != 0 {
		f.startUp()
	}
	if mask&waiter.WritableEvents != 0 {
		f.writable.Raise()
	}
	if mask&(waiter.EventHUp|waiter.EventErr) != 0 {
		f.checkGone()
	}
}

// isGone reports whether the application reset its connection or gVisor gave it up. For an RST after the application's
// FIN gVisor's state is StateClose, which a connection otherwise reaches only through the FIN of down.
func (f *tcpFlow) isGone() bool {
	switch tcp.EndpointState(f.ep.State()) {
	case tcp.StateError:
		return true
	case tcp.StateClose:
		return !f.finSent.Load()
	}
	return false
}

// checkGone passes an RST on to the stream if up does not see it, because up has ended or waits for the stream.
func (f *tcpFlow) checkGone() {
	if !f.isGone() || f.appGone.Swap(true) {
		return
	}
	grace := resetGrace
	if f.upState.Load() == upEnded {
		grace = 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resetLate = time.AfterFunc(grace, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if !f.ended {
			f.stream.Reset()
		}
	})
}

// copyBuffer is a pooled buffer of copyUp.
type copyBuffer struct {
	data [copyLen]byte
	n    int
}

var copyBuffers = sync.Pool{New: func() any { return new(copyBuffer) }}

// Write implements io.Writer for ep.Read.
func (b *copyBuffer) Write(p []byte) (int, error) {
	n := copy(b.data[b.n:], p)
	b.n += n
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

// startUp makes up read after this call.
func (f *tcpFlow) startUp() {
	for {
		switch state := f.upState.Load(); state {
		case upIdle:
			if f.upState.CompareAndSwap(upIdle, upRunning) {
				go f.up() // run waits for upDone
				return
			}
		case upRunning:
			if f.upState.CompareAndSwap(upRunning, upAgain) {
				return
			}
		default:
			return
		}
	}
}

// up copies from the application to the stream until nothing is left to read.
func (f *tcpFlow) up() {
	for {
		for f.copyUp() {
		}
		if f.upState.Load() == upEnded {
			close(f.upDone)
			return
		}
		if f.upState.CompareAndSwap(upRunning, upIdle) {
			return
		}
		f.upState.Store(upRunning)
	}
}

// copyUp copies once. It returns false if there is nothing to read, or if the direction has ended.
func (f *tcpFlow) copyUp() bool {
	buf := copyBuffers.Get().(*copyBuffer)
	defer copyBuffers.Put(buf)
	buf.n = 0
	_, err := f.ep.Read(buf, tcpip.ReadOptions{})
	switch err.(type) {
	case nil:
	case *tcpip.ErrWouldBlock:
		return false
	case *tcpip.ErrClosedForReceive:
		if f.isGone() {
			f.stream.Reset()
		} else {
			f.stream.CloseWrite() // if it fails, down gets the error from the stream
		}
		f.upState.Store(upEnded)
		return false
	default:
		f.stream.Reset()
		f.upState.Store(upEnded)
		return false
	}
	if _, err := f.stream.Write(buf.data[:buf.n]); err != nil {
		f.ep.Abort()
		f.stream.Reset()
		f.upState.Store(upEnded)
		return false
	}
	f.s.stats.tcp.bytesOut.Add(uint64(buf.n))
	return true
}

// down copies from the stream to the application. It reports whether the copy ended with the far end's FIN.
func (f *tcpFlow) down() (fin bool) {
	var err error
	if from, ok := f.stream.(io.WriterTo); ok {
		_, err = from.WriteTo(f)
	} else {
		buf := make([]byte, writeLen)
		_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{f.stream}, buf)
	}
	switch {
	case err == nil:
		f.finSent.Store(true)
		f.ep.Shutdown(tcpip.ShutdownWrite) // it fails only if the connection is gone
		return true
	case f.appGone.Load():
		// up or checkGone resets the stream, after the data that the application sent before.
	default:
		f.ep.Abort()
		f.stream.Reset()
	}
	return false
}

// awaitReset passes on an RST that follows the far end's FIN while the application holds its half open. The application
// receives the data before the FIN first.
func (f *tcpFlow) awaitReset() {
	stream, ok := f.stream.(interface{ Gone() <-chan struct{} })
	if !ok {
		return
	}
	select {
	case <-f.upDone:
		return
	case <-stream.Gone():
	}
	tick := time.NewTicker(finPoll)
	defer tick.Stop()
	for tcp.EndpointState(f.ep.State()) == tcp.StateFinWait1 { // gVisor has no event for the ACK of the FIN
		select {
		case <-f.upDone:
			return
		case <-tick.C:
		}
	}
	f.ep.Abort()
}

// Write implements io.Writer for down. It returns when gVisor has taken all of p.
func (f *tcpFlow) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		f.reader.Reset(p[written:min(written+writeLen, len(p))])
		n, err := f.ep.Write(&f.reader, tcpip.WriteOptions{})
		written += int(n)
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			<-f.writable
		default:
			f.checkGone()
			f.reader.Reset(nil)
			return written, errAppGone
		}
	}
	f.reader.Reset(nil) // the caller owns p
	f.s.stats.tcp.bytesIn.Add(uint64(written))
	return written, nil
}
