package tun

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/pkg/datapath/packet"
)

// Mapped is a Device whose packets have other addresses inside than outside: it translates the far address of each, by
// mappings that may change at any time. All that reads and writes it knows addresses of the cluster only.
//
//	program ─ 198.18.3.4 ─▶ kernel ─▶ Device ─ Read ─▶ 10.0.3.4 ─▶ netstack, packet streams
//	program ◀ 198.18.3.4 ── kernel ◀─ Device ◀ Writev ─ 10.0.3.4 ◀─
type Mapped struct {
	Device
	mappings atomic.Pointer[packet.Mappings] // nil: none
}

var _ Device = (*Mapped)(nil)

// Map replaces the mappings. Packets follow them from then on.
func (d *Mapped) Map(mappings packet.Mappings) {
	if len(mappings) == 0 {
		d.mappings.Store(nil)
		return
	}
	d.mappings.Store(&mappings)
}

// Read implements [Device].
func (d *Mapped) Read(p []byte) (int, error) {
	n, err := d.Device.Read(p)
	if m := d.mappings.Load(); m != nil && err == nil {
		m.Sent(p[:n])
	}
	return n, err
}

// SetReadDeadline is that of the Device, if it has one.
func (d *Mapped) SetReadDeadline(t time.Time) error {
	if limited, ok := d.Device.(interface{ SetReadDeadline(t time.Time) error }); ok {
		return limited.SetReadDeadline(t)
	}
	return errors.ErrUnsupported
}

// headers holds the translated beginning of a packet, and the pieces of one Writev.
type headers struct {
	bytes  [packet.MaxHeaders]byte
	pieces [][]byte
}

var headersPool = sync.Pool{New: func() any { return &headers{pieces: make([][]byte, 0, 16)} }}

// Writev implements [Device]. It translates a copy of the headers: pieces may belong to others.
func (d *Mapped) Writev(pieces [][]byte) error {
	m := d.mappings.Load()
	if m == nil {
		return d.Device.Writev(pieces)
	}
	h := headersPool.Get().(*headers)
	defer func() {
		clear(h.pieces)
		headersPool.Put(h)
	}()
	n := 0
	h.pieces = append(h.pieces[:0], nil)
	for _, piece := range pieces {
		taken := copy(h.bytes[n:], piece)
		n += taken
		if taken < len(piece) {
			h.pieces = append(h.pieces, piece[taken:])
		}
	}
	h.pieces[0] = h.bytes[:n]
	m.Received(h.bytes[:n])
	return d.Device.Writev(h.pieces)
}
