package tun_test

import (
	"encoding/binary"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
)

func TestDeviceKeepsTheContract(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can create a TUN device")
	}
	tuntest.TestDevice(t, func(t *testing.T) (tun.Device, tuntest.Peer) {
		d, err := tuntest.Open("utun", tuntest.DeviceMTU)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		up := exec.Command("ifconfig", d.Name(), "inet", tuntest.Kernel.String(), tuntest.Remote.String(), "up")
		if out, err := up.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, tuntest.Protocol)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_HDRINCL, 1); err != nil {
			t.Fatal(err)
		}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}); err != nil {
			t.Fatal(err)
		}
		return d, kernel(fd)
	})
}

// kernel is the kernel's side of a device: a raw socket, for which macOS keeps the total length and the offset in its
// own byte order (ip(4)).
type kernel int

func (k kernel) Send(p []byte) error {
	binary.NativeEndian.PutUint16(p[2:], uint16(len(p)))
	return unix.Sendto(int(k), p, 0, &unix.SockaddrInet4{Addr: tuntest.Remote.As4()})
}

func (k kernel) Receive() ([]byte, error) {
	buf := make([]byte, 1<<16)
	n, _, err := unix.Recvfrom(int(k), buf, 0)
	if err != nil {
		return nil, err
	}
	binary.BigEndian.PutUint16(buf[2:], uint16(n)) // the kernel has subtracted the header
	return buf[:n], nil
}
