package dial

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

// TestPortsAreReusedInTurn opens more connections to one address than there are ports, each closed by this end first,
// so that its port is in TIME_WAIT. A kernel that chooses runs out of ports.
func TestPortsAreReusedInTurn(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40015"), 0); err != nil {
		t.Fatal(err)
	}
	// On loopback the kernel takes ports in TIME_WAIT again by default, as it does not towards a pod.
	if err := os.WriteFile("/proc/sys/net/ipv4/tcp_tw_reuse", []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:9000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := newPorts()
	if p.first != 40000 || p.last != 40015 {
		t.Fatalf("ports %d to %d", p.first, p.last)
	}
	// A listener keeps one port in use.
	taken, err := net.Listen("tcp", "127.0.0.1:40003")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dst := netip.MustParseAddrPort("127.0.0.1:9000")
	once := func(connect func() (net.Conn, error)) error {
		c, err := connect()
		if err != nil {
			return err
		}
		defer c.Close()
		peer, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := peer.Read(make([]byte, 1)); err == nil {
			t.Fatal("read something")
		}
		return nil
	}
	for i := range 100 {
		if err := once(func() (net.Conn, error) { return p.connect(t.Context(), net.Dialer{}, dst) }); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	for i := range 20 { // the same with ports that the kernel chooses
		if err := once(func() (net.Conn, error) { return net.Dial("tcp", dst.String()) }); errors.Is(err, unix.EADDRNOTAVAIL) {
			return
		} else if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	t.Error("the kernel does not run out of ports, so the test proves nothing")
}
