package l3

import (
	"encoding/binary"
	"sync"

	"kubevpn/pkg/packet"
)

// A barrier keeps a flow's order where the flow leaves lane 0 for another lane, which may be on another carrier and ahead
// by as long as carriers take to be replaced. Order matters most then: a segment that TCP repeats and that overtakes
// what it repeats has the newer timestamp, and with it the receiver drops all that comes late (RFC 7323, section 5, PAWS).
//
//	lane 0:  │ flow │ others │ passed 7 │ others ...
//	lane 2:  │ others │ awaited 7 │ flow │ flow ...
//	                      ▲ nothing behind it is delivered before lane 0 has come to "passed 7"
//
// A barrier is a frame that is no packet: a virtio-net header of zeros, and
//
//	0 (no version of IP), kind, number: uint32, big endian
const (
	barrierPassed  = 1
	barrierAwaited = 2
	barrierLen     = packet.VirtioLen + 6
)

func newBarrier(kind byte, number uint32) *Frame {
	f := NewFrame()
	b := f.Buffer()[:barrierLen]
	clear(b)
	b[packet.VirtioLen+1] = kind
	binary.BigEndian.PutUint32(b[packet.VirtioLen+2:], number)
	f.SetLen(barrierLen)
	return f
}

// parseBarrier is ok for what newBarrier makes.
func parseBarrier(b []byte) (kind byte, number uint32, ok bool) {
	if len(b) != barrierLen {
		return 0, 0, false
	}
	for _, zero := range b[:packet.VirtioLen+1] {
		if zero != 0 {
			return 0, 0, false
		}
	}
	kind = b[packet.VirtioLen+1]
	return kind, binary.BigEndian.Uint32(b[packet.VirtioLen+2:]), kind == barrierPassed || kind == barrierAwaited
}

// Barriers is what all lanes from one Sender have in common at the other end. Its zero value is ready.
type Barriers struct {
	mu      sync.Mutex
	changed sync.Cond
	lanes   int    // number 0 that are received from
	ended   int    // how often there was none any more
	passed  uint32 // the latest
}

// begin and end say that a lane 0 is received from. Nobody waits for what none can bring, and the next Sender counts anew.
func (b *Barriers) begin() { b.set(func() { b.lanes++ }) }
func (b *Barriers) end() {
	b.set(func() {
		if b.lanes--; b.lanes == 0 {
			b.ended++
			b.passed = 0
		}
	})
}

func (b *Barriers) pass(number uint32) {
	b.set(func() {
		if int32(number-b.passed) > 0 { // numbers wrap
			b.passed = number
		}
	})
}

func (b *Barriers) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
	b.changed.Broadcast()
}

func (b *Barriers) await(number uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changed.L = &b.mu
	ended := b.ended
	for b.lanes > 0 && b.ended == ended && int32(number-b.passed) > 0 {
		b.changed.Wait()
	}
}
