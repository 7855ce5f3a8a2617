// Package tuntest provides TUN devices for tests. A Pair is two devices in memory: packets that one writes the other
// reads. It requires no kernel and no privilege. A Namespace, which requires root, is a network namespace for a device
// of [kubevpn/pkg/datapath/tun]. TestDevice checks an implementation of tun.Device.
package tuntest

import (
	"io"
	"os"
	"slices"
	"sync"
	"time"
)

// Device is one end of a pair. It implements tun.Device.
type Device struct {
	name string
	mtu  int
	gso  bool

	in, out chan []byte
	closed  chan struct{}
	once    *sync.Once // of the pair

	mu       sync.Mutex
	deadline chan struct{} // closed when the read deadline has passed
}

// Pair returns two connected devices. Each direction holds up to 256 packets; then Writev waits. gso is the result of
// their method GSO.
func Pair(mtu int, gso bool) (*Device, *Device) {
	ab, ba := make(chan []byte, 256), make(chan []byte, 256)
	closed, once := make(chan struct{}), new(sync.Once)
	end := func(name string, in, out chan []byte) *Device {
		return &Device{name: name, mtu: mtu, gso: gso, in: in, out: out, closed: closed, once: once,
			deadline: make(chan struct{})}
	}
	return end("test0", ba, ab), end("test1", ab, ba)
}

// Name returns test0 or test1.
func (d *Device) Name() string { return d.name }

// MTU returns the MTU of the Pair.
func (d *Device) MTU() int { return d.mtu }

// GSO returns the GSO of the Pair.
func (d *Device) GSO() bool { return d.gso }

// USO returns the GSO of the Pair.
func (d *Device) USO() bool { return d.gso }

// Read reads one packet, with its virtio-net header. After Close it returns os.ErrClosed.
func (d *Device) Read(p []byte) (int, error) {
	d.mu.Lock()
	deadline := d.deadline
	d.mu.Unlock()
	select {
	case packet := <-d.in:
		if len(packet) > len(p) {
			return 0, io.ErrShortBuffer
		}
		return copy(p, packet), nil
	case <-d.closed:
		return 0, os.ErrClosed
	case <-deadline:
		return 0, os.ErrDeadlineExceeded
	}
}

// Writev writes one packet. It waits while the queue to the other end is full.
func (d *Device) Writev(pieces [][]byte) error {
	select {
	case <-d.closed:
		return os.ErrClosed
	default:
	}
	select {
	case d.out <- slices.Concat(pieces...):
		return nil
	case <-d.closed:
		return os.ErrClosed
	}
}

// SetReadDeadline ends Read if t is a time in the past, and allows Read again if t is zero. It supports no other times.
func (d *Device) SetReadDeadline(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	passed := false
	select {
	case <-d.deadline:
		passed = true
	default:
	}
	if t.IsZero() && passed {
		d.deadline = make(chan struct{})
	} else if !t.IsZero() && !passed {
		close(d.deadline)
	}
	return nil
}

// Close closes both ends.
func (d *Device) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}
