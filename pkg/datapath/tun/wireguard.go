//go:build darwin || windows

package tun

import (
	"fmt"
	"sync"

	wg "golang.zx2c4.com/wireguard/tun"
)

// wireguardOffset leaves room for what wireguard's devices put before a packet (4 bytes on macOS).
const wireguardOffset = 16

// GSO is what [Device.GSO] says of every device on this system, for who has to say it before there is one.
const GSO = false

// device is a wireguard-go TUN device behind our interface: single packets, and zeros for a virtio-net header.
type device struct {
	tun  wg.Device
	name string
	mtu  int

	// Of the one reader.
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
		clear(p[:VirtioHeaderLen])
		return VirtioHeaderLen + copy(p[VirtioHeaderLen:], d.bufs[0][wireguardOffset:wireguardOffset+d.sizes[0]]), nil
	}
}

var joinBuffers = sync.Pool{New: func() any { return new([wireguardOffset + 65535 + VirtioHeaderLen]byte) }}

func (d *device) Writev(pieces [][]byte) error {
	joined := joinBuffers.Get().(*[wireguardOffset + 65535 + VirtioHeaderLen]byte)
	defer joinBuffers.Put(joined)
	// The virtio-net header ends where the packet has to begin.
	const start = wireguardOffset - VirtioHeaderLen
	n := start
	for _, piece := range pieces {
		n += copy(joined[n:], piece)
	}
	if _, err := d.tun.Write([][]byte{joined[:n]}, wireguardOffset); err != nil {
		return fmt.Errorf("writing to %s: %w", d.name, err)
	}
	return nil
}
