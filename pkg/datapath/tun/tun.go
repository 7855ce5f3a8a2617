// Package tun opens TUN devices, through which the laptop's kernel exchanges packets for the cluster with kubevpn. It
// is the outermost end of the data path; [kubevpn/pkg/datapath/netstack] reads and writes the packets.
//
// Only the creation of a device requires privilege. So [Create] runs in the privileged helper and returns a file, which
// can be passed to another process, and [Adopt] makes a [Device] from the file there.
//
//	helper (root)                          daemon (user)
//	Create("kubevpn0", 1500) ── *os.File ── Adopt ── Device ⇄ netstack
//	pkg/host/route: addresses, routes, up
//
// On Linux TCP super-packets of up to 64 KiB cross whole in both directions: the kernel does not split them into
// segments or compute their checksums. UDP super-packets cross whole to the kernel, which splits them for the receiver.
// The kernel splits UDP super-packets of programs before the device reads them. A device exists as long as its file.
// When the process ends for any reason, the kernel removes the device with its addresses and routes.
//
// On macOS there are no super-packets, and every virtio-net header is zero.
package tun

import (
	"errors"

	"kubevpn/pkg/datapath/packet"
)

// MinRead is the smallest buffer for [Device.Read]: a virtio-net header and the longest IPv4 packet. IPv6 packets may
// be up to 40 bytes longer.
const MinRead = packet.VirtioLen + 65535

// ErrNoTUN is the error for a machine without TUN devices: on Linux the module tun is not loaded, or a container lacks
// /dev/net/tun.
var ErrNoTUN = errors.New("no TUN device on this machine")

// A Device is an open TUN interface. One goroutine may read while any number write; Close may be called at any time. A
// virtio-net header ([packet.Virtio]) precedes every packet.
type Device interface {
	// Name returns the interface's name.
	Name() string
	// MTU returns the interface's maximum transmission unit in bytes at the time when the Device was opened.
	MTU() int
	// GSO reports whether packets may be super-packets of up to 64 KiB, or lack their checksum, as their virtio-net
	// header describes. Otherwise every header is, and must be, zero.
	GSO() bool
	// USO reports whether Writev also takes UDP super-packets, which the kernel splits (Linux 6.2). Read returns none.
	USO() bool
	// Read reads one virtio-net header and its packet into p, whose length is at least [MinRead]. After Close it
	// returns an error that is os.ErrClosed.
	Read(p []byte) (int, error)
	// Writev writes one packet in pieces, the first of which begins with the virtio-net header. It does not retain the
	// pieces. It waits while the device is full, and returns an error if the device drops the packet.
	Writev(pieces [][]byte) error
	// Close closes the device, which ends Read and Writev. The kernel removes the interface when its last file is
	// closed.
	Close() error
}
