package sockets

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

func find(t *testing.T, proto uint8, local net.Addr) (Socket, bool) {
	t.Helper()
	at := netip.MustParseAddrPort(local.String())
	all, err := List(netip.Addr.IsLoopback)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Proto == proto && s.Local == at {
			return s, true
		}
	}
	return Socket{}, false
}

func TestListCountsBytesOfAConnection(t *testing.T) {
	for network, address := range map[string]string{"tcp4": "127.0.0.1:0", "tcp6": "[::1]:0"} {
		t.Run(network, func(t *testing.T) {
			l, err := net.Listen(network, address)
			if err != nil {
				t.Skipf("SKIPPED: %v", err)
			}
			defer l.Close()
			if s, ok := find(t, unix.IPPROTO_TCP, l.Addr()); ok {
				t.Errorf("the listener is in the list: %+v", s)
			}
			near, err := net.Dial(network, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer near.Close()
			far, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer far.Close()
			if _, err := near.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			if _, err := far.Write(make([]byte, 300)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(far, make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, time.Minute, func() error {
				s, ok := find(t, unix.IPPROTO_TCP, near.LocalAddr())
				if !ok || s.TCP.Sent != 1000 || s.TCP.Received != 300 || s.Unread != 300 || s.TCP.Connecting {
					return errors.New("not as expected")
				}
				if s.Remote.String() != l.Addr().String() || s.TCP.RTT <= 0 {
					t.Errorf("%+v", s)
				}
				return nil
			})
		})
	}
}

func TestOwnersFindsThisProcess(t *testing.T) {
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, ok := find(t, unix.IPPROTO_UDP, c.LocalAddr())
	if !ok || s.Inode == 0 || s.TCP != nil {
		t.Fatalf("%v %+v", ok, s)
	}
	owners, err := Owners(map[uint32]bool{s.Inode: true, 1: true})
	if err != nil {
		t.Fatal(err)
	}
	p := owners[s.Inode]
	if p.PID != os.Getpid() || !strings.HasPrefix(filepath.Base(os.Args[0]), p.Name) || len(owners) != 1 {
		t.Errorf("%+v", owners)
	}
}
