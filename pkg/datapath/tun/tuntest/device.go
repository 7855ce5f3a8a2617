package tuntest

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
)

// Peer is the other side of a Device: the kernel, or the other end of a Pair. A packet is an IP packet without
// virtio-net header.
type Peer interface {
	// Send sends a packet, which the device reads.
	Send(packet []byte) error
	// Receive returns a packet that the device wrote.
	Receive() ([]byte, error)
}

// DeviceMTU is the MTU of the devices for TestDevice.
const DeviceMTU = 1500

// TestDevice checks that a Device does what the documentation of tun.Device says. open returns a new one that is up,
// and its peer. It closes both at the end of the test.
func TestDevice(t *testing.T, open func(t *testing.T) (tun.Device, Peer)) {
	checks := []struct {
		name  string
		check func(*testing.T, tun.Device, Peer)
	}{
		{"reads_whole_packets_in_order", testReads},
		{"writes_whole_packets_in_order", testWrites},
		{"retains_no_pieces", testPieces},
		{"concurrent_writes_stay_whole", testConcurrentWrites},
		{"read_deadline", testReadDeadline},
		{"close_ends_read", testClose},
	}
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			d, peer := open(t)
			if d.Name() == "" || d.MTU() != DeviceMTU {
				t.Errorf("device %q, MTU %d", d.Name(), d.MTU())
			}
			c.check(t, d, peer)
		})
	}
}

// Protocol is the protocol of the packets, a number that nothing else uses (RFC 3692).
const Protocol = 253

// sizes are the payload lengths of test packets.
var sizes = []int{0, 1, 20, 333, 1000, DeviceMTU - 20}

// Kernel and Remote are the addresses of the kernel and of the other side of the device.
var Kernel, Remote = netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.9")

// written returns a packet for the kernel whose payload has n bytes of the value fill.
func written(n int, fill byte) []byte { return testPacket(Remote, Kernel, n, fill) }

// sent returns a packet from the kernel whose payload has n bytes of the value fill.
func sent(n int, fill byte) []byte { return testPacket(Kernel, Remote, n, fill) }

func testPacket(src, dst netip.Addr, n int, fill byte) []byte {
	ip := packet.Outgoing{Src: src, Dst: dst, Proto: Protocol, PayloadLen: n}
	return append(ip.Append(nil), bytes.Repeat([]byte{fill}, n)...)
}

// same reports whether two packets are the same except for the identification, which macOS sets, and the checksum.
func same(a, b []byte) bool {
	plain := func(p []byte) []byte {
		p = bytes.Clone(p)
		clear(p[4:6])
		clear(p[10:12])
		return p
	}
	return len(a) >= 20 && len(b) >= 20 && bytes.Equal(plain(a), plain(b))
}

// isTestPacket reports whether this package made the packet. The kernel also sends some of its own.
func isTestPacket(p []byte) bool {
	h, err := packet.Parse(p)
	return err == nil && h.Proto == Protocol
}

// read returns the next test packet that the device reads.
func read(t *testing.T, d tun.Device) []byte {
	t.Helper()
	buf := make([]byte, tun.MinRead)
	for {
		n, err := d.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := packet.ParseVirtio(buf[:n]); err != nil {
			t.Fatalf("the virtio-net header: %v", err)
		}
		if !d.GSO() && !bytes.Equal(buf[:packet.VirtioLen], make([]byte, packet.VirtioLen)) {
			t.Errorf("virtio-net header % x of a device without GSO", buf[:packet.VirtioLen])
		}
		if p := buf[packet.VirtioLen:n]; isTestPacket(p) {
			return p
		}
	}
}

// receive returns the next test packet that the peer receives.
func receive(t *testing.T, peer Peer) []byte {
	t.Helper()
	for {
		p, err := peer.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if isTestPacket(p) {
			return p
		}
	}
}

func testReads(t *testing.T, d tun.Device, peer Peer) {
	for i, n := range sizes {
		if err := peer.Send(sent(n, byte(i))); err != nil {
			t.Fatal(err)
		}
	}
	for i, n := range sizes {
		if got := read(t, d); !same(got, sent(n, byte(i))) {
			t.Errorf("packet %d: read %d bytes, want %d of payload", i, len(got), n)
		}
	}
}

func testWrites(t *testing.T, d tun.Device, peer Peer) {
	for i, n := range sizes {
		if err := d.Writev([][]byte{make([]byte, packet.VirtioLen), written(n, byte(i))}); err != nil {
			t.Fatal(err)
		}
	}
	for i, n := range sizes {
		if got := receive(t, peer); !same(got, written(n, byte(i))) {
			t.Errorf("packet %d: received %d bytes, want %d of payload", i, len(got), n)
		}
	}
}

// testPieces writes a packet in pieces, the first of which contains more than the virtio-net header.
func testPieces(t *testing.T, d tun.Device, peer Peer) {
	want := written(500, 7)
	whole := slices.Concat(make([]byte, packet.VirtioLen), want)
	const first = packet.VirtioLen + 3
	if err := d.Writev([][]byte{whole[:first], whole[first:100], {}, whole[100:]}); err != nil {
		t.Fatal(err)
	}
	clear(whole) // the device must not use it any more
	if got := receive(t, peer); !same(got, want) {
		t.Errorf("received % x", got)
	}
}

func testConcurrentWrites(t *testing.T, d tun.Device, peer Peer) {
	const writers, each = 4, 50
	var writing sync.WaitGroup
	defer writing.Wait()
	for i := range writers {
		writing.Go(func() {
			for range each {
				p := written(100*(i+1), byte(i))
				if err := d.Writev([][]byte{make([]byte, packet.VirtioLen), p[:20], p[20:]}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range writers * each {
		p := receive(t, peer)
		i := int(p[len(p)-1])
		if !same(p, written(100*(i+1), byte(i))) {
			t.Fatalf("received % x", p)
		}
	}
}

// testReadDeadline checks the method SetReadDeadline, which a device may have: netstack stops Read with it.
func testReadDeadline(t *testing.T, d tun.Device, peer Peer) {
	limited, ok := d.(interface{ SetReadDeadline(t time.Time) error })
	if !ok {
		t.Log("the device has no read deadline")
		return
	}
	if err := limited.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Read(make([]byte, tun.MinRead)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read after its deadline: %v", err)
	}
	if err := limited.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if err := peer.Send(sent(9, 9)); err != nil {
		t.Fatal(err)
	}
	read(t, d)
}

func testClose(t *testing.T, d tun.Device, _ Peer) {
	done := make(chan error, 1)
	go func() {
		var err error
		for buf := make([]byte, tun.MinRead); err == nil; {
			_, err = d.Read(buf)
		}
		done <- err
	}()
	if err := d.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read: %v, want os.ErrClosed", err)
	}
	if _, err := d.Read(make([]byte, tun.MinRead)); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read after Close: %v, want os.ErrClosed", err)
	}
	pieces := [][]byte{make([]byte, packet.VirtioLen), written(1, 1)}
	if err := d.Writev(pieces); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Writev after Close: %v, want os.ErrClosed", err)
	}
}

// Open calls tun.Create and tun.Adopt in one process.
func Open(name string, mtu int) (tun.Device, error) {
	f, err := tun.Create(name, mtu)
	if err != nil {
		return nil, err
	}
	return tun.Adopt(f, f.Name(), mtu)
}
