package tuntest

import (
	"errors"
	"os"
	"testing"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
)

// other is a Peer that is the other end of a Pair.
type other struct{ *Device }

func (o other) Send(p []byte) error { return o.Writev([][]byte{make([]byte, packet.VirtioLen), p}) }

func (o other) Receive() ([]byte, error) {
	buf := make([]byte, tun.MinRead)
	n, err := o.Read(buf)
	return buf[min(n, packet.VirtioLen):n], err
}

func TestPairKeepsTheContract(t *testing.T) {
	for name, gso := range map[string]bool{"gso": true, "plain": false} {
		t.Run(name, func(t *testing.T) {
			TestDevice(t, func(t *testing.T) (tun.Device, Peer) {
				a, b := Pair(DeviceMTU, gso)
				t.Cleanup(func() { a.Close() })
				return a, other{b}
			})
		})
	}
}

func TestPairConnectsTwoDevices(t *testing.T) {
	a, b := Pair(1500, true)
	if err := a.Writev([][]byte{{1}, {2, 3}}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 10)
	if n, err := b.Read(buf); err != nil || string(buf[:n]) != "\x01\x02\x03" {
		t.Errorf("read %x, %v", buf[:n], err)
	}
	b.SetReadDeadline(time.Now())
	if _, err := b.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	b.SetReadDeadline(time.Time{})
	a.Close()
	if _, err := b.Read(buf); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := b.Writev([][]byte{{1}}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("writing after Close: %v", err)
	}
}
