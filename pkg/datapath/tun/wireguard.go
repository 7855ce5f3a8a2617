//go:build darwin || windows

package tun

import (
	"fmt"
	"sync"

	wg "golang.zx2c4.com/wireguard/tun"

	"kubevpn/pkg/datapath/packet"
)

// wireguardOffset is the room for the header that wireguard's devices put before a packet (4 bytes on macOS).
const wireguardOffset = 16

// GSO is the result of [Device.GSO] for every device on this operating system.
const GSO = false

// device is a Device on a TUN device of wireguard-go. Packets are single ones, with a virtio-net header of zeros.
type device struct {
	tun  wg.Device
	name string
	mtu  int

	// Used only by Read.
	bufs  [1][]byte
	sizes [1]int
}

func newDevice(tun wg.Device, mtu int) (*device, error) {
	name, err := tun.Name()
	if err != nil {
		tun.Close()
		return nil, fmt.Errorf("reading the name of the TUN device: %w", err)
	}
	d := &device{tun: tun, name: name, mtu: mtu}
	d.bufs[0] = make([]byte, wireguardOffset+65535)
	return d, nil
}

func (d *device) Name() string { return d.name }
func (d *device) MTU() int     { return d.mtu }
func (d *device) GSO() bool    { return GSO }
func (d *device) USO() bool    { return false }
func (d *device) Close() error { return d.tun.Close() }

func (d *device) Read(p []byte) (int, error) {
	for {
		n, err := d.tun.Read(d.bufs[:], d.sizes[:], wireguardOffset)
		if err != nil {
			return 0, fmt.Errorf("reading from %s: %w", d.name, err)
		}
		if n == 0 {
			continue
		}
		clear(p[:packet.VirtioLen])
		return packet.VirtioLen + copy(p[packet.VirtioLen:], d.bufs[0][wireguardOffset:wireguardOffset+d.sizes[0]]), nil
	}
}

var joinBuffers = sync.Pool{New: func() any { return new([wireguardOffset + 65535 + packet.VirtioLen]byte) }}

func (d *device) Writev(pieces [][]byte) error {
	joined := joinBuffers.Get().(*[wireguardOffset + 65535 + packet.VirtioLen]byte)
	defer joinBuffers.Put(joined)
	// The virtio-net header ends where the packet must begin.
	const start = wireguardOffset - packet.VirtioLen
	n := start
	for _, piece := range pieces {
		n += copy(joined[n:], piece)
	}
	if _, err := d.tun.Write([][]byte{joined[:n]}, wireguardOffset); err != nil {
		return fmt.Errorf("writing to %s: %w", d.name, err)
	}
	return nil
}
