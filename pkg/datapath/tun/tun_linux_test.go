package tun_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newDevice makes the device t0 with 10.1.0.1/24 and fd01::1/64 in a namespace of its own.
func newDevice(t testing.TB) (*tuntest.Namespace, tun.Device) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	ns := tuntest.NewNamespace(t)
	var f *os.File
	if err := ns.Do(func() (err error) { f, err = tun.Create("t0", 1500); return err }); err != nil {
		t.Fatal(err)
	}
	d, err := tun.Adopt(f, "t0", 1500)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	ns.Run("ip", "addr", "add", "10.1.0.1/24", "dev", "t0")
	ns.Run("ip", "addr", "add", "fd01::1/64", "dev", "t0", "nodad")
	ns.Run("ip", "link", "set", "t0", "up")
	// The kernel accepts packets for an IPv6 address some time after it has added the address.
	testenv.Until(t, "the kernel accepts packets for fd01::1", func() bool {
		out, err := ns.Output("ip", "-6", "route", "show", "table", "local")
		return err == nil && strings.Contains(out, "local fd01::1 ")
	})
	return ns, d
}

func TestCreateSetsUpTheInterface(t *testing.T) {
	ns, d := newDevice(t)
	out, err := ns.Output("ip", "-o", "link", "show", "t0")
	if err != nil || !strings.Contains(out, "mtu 1500 ") || !strings.Contains(out, "qlen 4096") {
		t.Errorf("%v: %s", err, out)
	}
	if d.Name() != "t0" || d.MTU() != 1500 || !d.GSO() {
		t.Errorf("device %s, MTU %d, GSO %v", d.Name(), d.MTU(), d.GSO())
	}
	err = ns.Do(func() error { _, err := tun.Create("t0", 1500); return err })
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("a second t0: %v, want EBUSY", err)
	}
	d.Close()
	if out, err := ns.Output("ip", "link", "show", "t0"); err == nil {
		t.Errorf("t0 outlived its file: %s", out)
	}
}

func TestCreateRejectsNames(t *testing.T) {
	for _, name := range []string{"", "tun%d", "a/b", "a b", "sixteen-letters-"} {
		if f, err := tun.Create(name, 1500); err == nil {
			f.Close()
			t.Errorf("Create accepts %q", name)
		}
	}
}

func TestAdoptRejectsOtherFiles(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tun.Adopt(f, "t0", 1500); err == nil || !strings.Contains(err.Error(), "not a TUN device") {
		t.Errorf("error %v", err)
	}
	if err := f.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the file was left open: %v", err)
	}
}

// TestDatagramsCrossTheDevice sends a datagram out of the kernel and the answer back into it.
func TestDatagramsCrossTheDevice(t *testing.T) {
	for _, tt := range []struct{ name, local, remote string }{
		{"ipv4", "10.1.0.1", "10.1.0.9"},
		{"ipv6", "fd01::1", "fd01::9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, d := newDevice(t)
			remote := netip.AddrPortFrom(netip.MustParseAddr(tt.remote), 53)
			var conn *net.UDPConn
			if err := ns.Do(func() (err error) {
				conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(remote))
				return err
			}); err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write([]byte("question")); err != nil {
				t.Fatal(err)
			}
			h, body := readFrom(t, d, netip.MustParseAddr(tt.local))
			if h.Proto != packet.ProtoUDP || h.Dst != remote.Addr() || string(body[8:]) != "question" {
				t.Fatalf("read %+v %q", h, body)
			}

			local := conn.LocalAddr().(*net.UDPAddr).AddrPort()
			local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port())
			answer := []byte("answer")
			udp := packet.UDP(remote, local, answer, true)
			ip := packet.Outgoing{Src: h.Dst, Dst: h.Src, Proto: packet.ProtoUDP, PayloadLen: len(udp) + len(answer)}
			header := ip.Append(nil)
			virtio := packet.Virtio{Flags: packet.VirtioNeedsChecksum, ChecksumStart: uint16(len(header)), ChecksumOffset: 6}
			var v [packet.VirtioLen]byte
			virtio.Put(v[:])
			if err := d.Writev([][]byte{v[:], header, udp[:], answer}); err != nil {
				t.Fatal(err)
			}
			conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			buf := make([]byte, 100)
			if n, err := conn.Read(buf); err != nil || string(buf[:n]) != "answer" {
				t.Errorf("read %q, %v", buf[:n], err)
			}
		})
	}
}

// readFrom reads until there is a packet from src; the kernel sends some of its own when an interface comes up.
func readFrom(t *testing.T, d tun.Device, src netip.Addr) (packet.Header, []byte) {
	t.Helper()
	buf := make([]byte, tun.MinRead)
	for {
		n, err := d.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := packet.ParseVirtio(buf[:n]); err != nil {
			t.Fatalf("%v: %s", err, hex.Dump(buf[:n]))
		}
		h, err := packet.Parse(buf[packet.VirtioLen:n])
		if err != nil {
			t.Fatalf("%v: %s", err, hex.Dump(buf[:n]))
		}
		if h.Src == src {
			return h, buf[packet.VirtioLen:n][h.HeaderLen:h.Len]
		}
	}
}

func TestCloseEndsRead(t *testing.T) {
	_, d := newDevice(t)
	done := make(chan error, 1)
	go func() {
		buf := make([]byte, tun.MinRead)
		for {
			if _, err := d.Read(buf); err != nil {
				done <- err
				return
			}
		}
	}()
	d.Close()
	select {
	case err := <-done:
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("Read: %v, want os.ErrClosed", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("Close did not end Read")
	}
	if err := d.Writev([][]byte{make([]byte, 30)}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Writev after Close: %v, want os.ErrClosed", err)
	}
}

func TestReadDeadlineEndsRead(t *testing.T) {
	_, d := newDevice(t)
	d.(interface{ SetReadDeadline(time.Time) error }).SetReadDeadline(time.Now().Add(-time.Second))
	if _, err := d.Read(make([]byte, tun.MinRead)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read: %v", err)
	}
}

func TestWriteReportsRejectedPackets(t *testing.T) {
	ns, d := newDevice(t)
	if err := d.Writev([][]byte{make([]byte, 10), {0xff, 0xff}}); err == nil {
		t.Error("Writev accepts a packet that is neither IPv4 nor IPv6")
	}
	ns.Run("ip", "link", "set", "t0", "down")
	ip := packet.Outgoing{Src: netip.MustParseAddr("10.1.0.9"), Dst: netip.MustParseAddr("10.1.0.1"), Proto: 17, PayloadLen: 0}
	if err := d.Writev([][]byte{make([]byte, 10), ip.Append(nil)}); !errors.Is(err, unix.EIO) {
		t.Errorf("writing to an interface that is down: %v, want EIO", err)
	}
}

func TestAdoptTakesAFileFromASocket(t *testing.T) {
	testenv.NeedRoot(t)
	ns := tuntest.NewNamespace(t)
	var f *os.File
	if err := ns.Do(func() (err error) { f, err = tun.Create("t0", 9000); return err }); err != nil {
		t.Fatal(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte{1}, unix.UnixRights(int(f.Fd())), nil, 0); err != nil {
		t.Fatal(err)
	}
	f.Close()
	buf, oob := make([]byte, 1), make([]byte, 100)
	_, n, _, _, err := unix.Recvmsg(pair[1], buf, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		t.Fatal(err)
	}
	// A descriptor that arrived is in blocking mode as far as this process knows.
	unix.SetNonblock(fds[0], false)
	d, err := tun.Adopt(os.NewFile(uintptr(fds[0]), "passed"), "t0", 9000)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { io.Copy(io.Discard, packetReader{d}); close(done) }()
	d.Close()
	<-done
}

type packetReader struct{ d tun.Device }

func (r packetReader) Read(p []byte) (int, error) {
	buf := make([]byte, tun.MinRead)
	n, err := r.d.Read(buf)
	return min(n, len(p)), err
}

func BenchmarkWritev(b *testing.B) {
	_, d := newDevice(b)
	payload := bytes.Repeat([]byte{1}, 1000)
	src, dst := netip.MustParseAddrPort("10.1.0.9:9"), netip.MustParseAddrPort("10.1.0.1:9")
	udp := packet.UDP(src, dst, payload, false)
	ip := packet.Outgoing{Src: src.Addr(), Dst: dst.Addr(), Proto: packet.ProtoUDP, PayloadLen: 8 + len(payload)}
	pieces := [][]byte{make([]byte, packet.VirtioLen), ip.Append(nil), udp[:], payload}
	b.ReportAllocs()
	for b.Loop() {
		if err := d.Writev(pieces); err != nil {
			b.Fatal(err)
		}
	}
}
