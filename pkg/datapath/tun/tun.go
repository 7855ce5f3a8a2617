// Package tun opens TUN devices: the interface through which the laptop's kernel hands over the packets that are
// meant for the cluster, and takes the answers. It is the outermost end of the data path;
// [kubevpn/pkg/datapath/netstack] reads and writes the packets.
//
// Creating a device needs privilege and using it does not, so the two are apart: [Create] runs in the privileged
// helper and gives a file, which can be passed to another process, and [Adopt] makes a [Device] of it there.
//
//	helper (root)                          daemon (user)
//	Create("kubevpn0", 1500) ── *os.File ── Adopt ── Device ⇄ netstack
//	pkg/host/route: addresses, routes, up
//
// On Linux packets come and go with a virtio-net header, and TCP super-packets of up to 64 KiB cross whole in both
// directions: the kernel need not cut them into segments, nor compute their checksums. USO, the same for UDP, is not
// asked for; the kernel cuts those itself. The device lives as long as its file: it is not persistent, so when the
// process dies, however, the kernel removes it with its addresses and routes.
//
// On macOS and Windows packets come one by one and the header is always zero.
package tun

import "errors"

// VirtioHeaderLen is the length of the virtio-net header (struct virtio_net_hdr) before every packet that is read or
// written. It is zero where there is no offload.
const VirtioHeaderLen = 10

// MinRead is the smallest buffer that [Device.Read] takes: a header and the longest IPv4 packet. IPv6 packets may be
// up to 40 bytes longer.
const MinRead = VirtioHeaderLen + 65535

// ErrNoTUN says that this machine has no TUN devices: on Linux the module tun is not loaded, or a container was not
// given /dev/net/tun.
var ErrNoTUN = errors.New("no TUN device on this machine")

// A Device is an open TUN interface. One goroutine may read while any number write; Close may be called at any time.
type Device interface {
	// Name is the interface's name.
	Name() string
	// MTU is the interface's maximum transmission unit in bytes, as it was when the Device was made.
	MTU() int
	// GSO says whether packets may be super-packets of up to 64 KiB, or lack their checksum, as their virtio-net
	// header describes. Without it every header is, and must be, zero.
	GSO() bool
	// Read reads one virtio-net header and the packet behind it into p, whose length is at least [MinRead]. After
	// Close it returns an error that is os.ErrClosed.
	Read(p []byte) (int, error)
	// Writev writes one packet that is given in pieces, a virtio-net header first. It does not keep the pieces.
	// It waits when the device cannot take more; it never drops a packet without an error.
	Writev(pieces [][]byte) error
	// Close closes the device, which ends Read and Writev. Closing the last file of a device removes the interface.
	Close() error
}
