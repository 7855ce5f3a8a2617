package packetlink

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
)

// plainTUN creates a TUN device without offloads, which returns packets as they are on a wire.
func plainTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("making %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// router is a kernel that forwards packets from in to a device without offload.
type router struct {
	t   *testing.T
	in  tun.Device
	out *os.File
	buf []byte
}

func newRouter(t *testing.T) *router {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip", "sysctl")
	ns := tuntest.NewNamespace(t)
	var in tun.Device
	var out *os.File
	if err := ns.Do(func() (err error) {
		if in, err = tuntest.Open("in", 65520); err != nil {
			return err
		}
		out, err = plainTUN("out")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); out.Close() })
	ns.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.in.rp_filter=0")
	ns.Run("ip", "addr", "add", "10.1.0.1/24", "dev", "in")
	ns.Run("ip", "addr", "add", "fd01::1/64", "dev", "in", "nodad")
	ns.Run("ip", "link", "set", "in", "up")
	ns.Run("ip", "link", "set", "out", "mtu", "9000", "txqueuelen", "10000", "up")
	ns.Run("ip", "route", "add", "10.2.0.0/24", "dev", "out")
	ns.Run("ip", "route", "add", "fd02::/64", "dev", "out")
	return &router{t, in, out, make([]byte, 65536)}
}

// read returns the next forwarded packet. It skips packets of the kernel's own, such as router solicitations.
func (r *router) read() ([]byte, error) {
	for {
		n, err := r.out.Read(r.buf)
		if err != nil {
			return nil, err
		}
		h, err := packet.Parse(r.buf[:n])
		if err != nil {
			return nil, err
		}
		if h.Proto == packet.ProtoTCP || h.Proto == packet.ProtoUDP {
			return r.buf[:n], nil
		}
	}
}

// want reads the packets of want, which have virtio-net headers of zeros.
func (r *router) want(about any, want [][]byte) {
	r.t.Helper()
	for j, w := range want {
		r.out.SetReadDeadline(time.Now().Add(5 * time.Second))
		got, err := r.read()
		if err != nil {
			r.t.Fatalf("%+v: packet %d of %d: %v", about, j, len(want), err)
		}
		if !bytes.Equal(got, w[packet.VirtioLen:]) {
			show := min(100, len(got), len(w)-packet.VirtioLen)
			r.t.Fatalf("%+v: packet %d of %d:\nkernel %d bytes %s\nhere   %d bytes %s", about, j, len(want),
				len(got), hex.EncodeToString(got[:show]), len(w)-packet.VirtioLen,
				hex.EncodeToString(w[packet.VirtioLen:][:show]))
		}
	}
}

// end checks that nothing else was forwarded.
func (r *router) end() {
	r.t.Helper()
	r.out.SetReadDeadline(time.Now())
	if got, err := r.read(); err == nil {
		r.t.Errorf("the kernel made another packet: %.80x", got)
	}
}

// finished returns the packets that a Sender makes of one for an end without offload.
func finished(t *testing.T, sp spec) [][]byte {
	t.Helper()
	g := frame(sp.bytes())
	if _, err := g.Header(); err != nil {
		t.Fatalf("%+v: %v", sp, err)
	}
	l, err := g.finish()
	if err != nil {
		t.Fatalf("%+v: %v", sp, err)
	}
	var w []byte
	for g := l.head; g != nil; g = g.next {
		w = append(w, g.buf[:g.end]...)
	}
	l.release()
	got, malformed, err := receiveAll(bytes.NewReader(w))
	if err != nil || malformed > 0 {
		t.Fatalf("%+v: %d malformed, %v", sp, malformed, err)
	}
	return got
}

// TestSegmentsEqualThoseOfLinux gives the same packets to a Sender for an end without offload, and to the kernel, which forwards them
// to a device without offload. The resulting packets are the same, to the byte.
func TestSegmentsEqualThoseOfLinux(t *testing.T) {
	k := newRouter(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range 400 {
		sp := spec{
			v6: i%2 == 1, sport: uint16(r.Uint32()), dport: uint16(r.Uint32()), seq: r.Uint32(), id: uint16(1 + r.IntN(65535)),
			options: 4 * r.IntN(11), flags: []byte{0, 0x08, 0x09, 0x80, 0x89, 0xc9, 0x40, 0x28}[r.IntN(8)],
			src: netip.MustParseAddr("10.1.0.9"), dst: netip.MustParseAddr("10.2.0.9"),
		}
		if sp.v6 {
			sp.src, sp.dst = netip.MustParseAddr("fd01::9"), netip.MustParseAddr("fd02::9")
		}
		switch r.IntN(5) {
		case 0:
			sp.proto, sp.options, sp.partial, sp.payload = packet.ProtoUDP, 0, true, r.IntN(8900)
		case 1:
			sp.partial, sp.payload = true, r.IntN(8800)
		case 2: // around a whole number of segments
			sp.gso = 100 + r.IntN(3000)
			sp.payload = min(65000, sp.gso*(1+r.IntN(20))+r.IntN(3)-1)
		default:
			sp.gso = 64 + r.IntN(8700)
			sp.payload = 1 + r.IntN(65000)
		}
		sp.ttl = 63 // as after the kernel has forwarded the packet
		want := finished(t, sp)
		sp.ttl = 64
		whole := frame(sp.bytes())
		if _, err := whole.Header(); err != nil {
			t.Fatalf("%+v: %v", sp, err)
		}
		err := k.in.Writev([][]byte{whole.Bytes()})
		whole.Release()
		if err != nil {
			t.Fatalf("%+v: %v", sp, err)
		}
		k.want(sp, want)
	}
	k.end()
}

// TestKernelSplitsWhatAWriterJoins has a Writer write datagrams of several flows. The kernel forwards the same packets as if each was
// written alone.
func TestKernelSplitsWhatAWriterJoins(t *testing.T) {
	k := newRouter(t)
	if !k.in.USO() {
		t.Skip("this kernel has no UDP segmentation offload for TUN devices")
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var failed atomic.Uint64
	for i := range 100 {
		w := NewWriter(&failed)
		sp := spec{
			proto: packet.ProtoUDP, partial: true, v6: i%2 == 1, sport: uint16(1 + r.Uint32N(65535)), dport: 80, id: 1,
			src: netip.MustParseAddr("10.1.0.9"), dst: netip.MustParseAddr("10.2.0.9"),
		}
		if sp.v6 {
			sp.src, sp.dst = netip.MustParseAddr("fd01::9"), netip.MustParseAddr("fd02::9")
		}
		size := 1 + r.IntN(3000)
		var want [][]byte
		for range 1 + r.IntN(150) {
			sp.id++
			sp.payload = size
			switch r.IntN(20) {
			case 0:
				sp.payload = r.IntN(size + 1)
			case 1:
				size = 1 + r.IntN(3000)
			case 2:
				sp.sport++
			}
			sp.ttl = 63
			want = append(want, finished(t, sp)...)
			sp.ttl = 64
			f := frame(sp.bytes())
			if _, err := f.Header(); err != nil {
				t.Fatalf("%+v: %v", sp, err)
			}
			w.Write(k.in, f)
		}
		w.Flush()
		k.want(sp, want)
	}
	k.end()
	if failed.Load() > 0 {
		t.Errorf("%d packets were rejected", failed.Load())
	}
}
