package tun_test

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
)

func TestDeviceKeepsTheContract(t *testing.T) {
	tuntest.TestDevice(t, func(t *testing.T) (tun.Device, tuntest.Peer) {
		ns, d := newDevice(t)
		k := &kernel{}
		if err := ns.Do(func() error { return k.open(d.Name()) }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(k.fd) })
		return d, k
	})
}

// kernel is the kernel's side of a device: a packet socket on the interface.
type kernel struct{ fd, index int }

func (k *kernel) open(name string) error {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	k.index = link.Index
	const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network byte order
	if k.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all&0xffff); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20); err != nil {
		return err
	}
	if err := unix.SetsockoptTimeval(k.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}); err != nil {
		return err
	}
	return unix.Bind(k.fd, &unix.SockaddrLinklayer{Protocol: all & 0xffff, Ifindex: k.index})
}

func (k *kernel) Send(p []byte) error {
	const ip = unix.ETH_P_IP<<8 | unix.ETH_P_IP>>8
	return unix.Sendto(k.fd, p, 0, &unix.SockaddrLinklayer{Protocol: ip & 0xffff, Ifindex: k.index})
}

// Receive skips the packets that leave the kernel by the interface.
func (k *kernel) Receive() ([]byte, error) {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(k.fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING {
			return buf[:n], nil
		}
	}
}
