package packetlink

import (
	"encoding/binary"
	"sync"

	"kubevpn/pkg/datapath/packet"
)

// A barrier keeps a flow's order when the flow leaves stream 0 for a bulk stream. The bulk stream may use another conn,
// and may be ahead by as long as it takes to replace a conn. Order matters most then: if a segment that TCP retransmits
// overtakes the original, it has the newer timestamp, and the receiver drops everything that follows with an older one
// (RFC 7323, section 5, PAWS).
//
//	stream 0:  │ flow │ others │ passed 7 │ others ...
//	stream 2:  │ others │ awaited 7 │ flow │ flow ...
//	                        ▲ the receiver delivers nothing behind it before stream 0 has reached "passed 7"
//
// A barrier is a frame without a packet: a virtio-net header of zeros, and
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

// parseBarrier parses a frame of newBarrier.
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

// Barriers holds back the bulk streams of one Sender at their receiver. All streams of the Sender share it. The zero
// value is ready to use, and its methods may be called concurrently.
type Barriers struct {
	mu      sync.Mutex
	changed sync.Cond
	streams int    // streams with number 0 that Receive reads from
	ended   int    // how often the last open one of them ended
	passed  uint32 // the highest number that stream 0 has reached
}

// begin and end note that a stream 0 is open. Without one await returns at once, and the numbers of the next stream 0
// restart.
func (b *Barriers) begin() { b.set(func() { b.streams++ }) }
func (b *Barriers) end() {
	b.set(func() {
		if b.streams--; b.streams == 0 {
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
	for b.streams > 0 && b.ended == ended && int32(number-b.passed) > 0 {
		b.changed.Wait()
	}
}
