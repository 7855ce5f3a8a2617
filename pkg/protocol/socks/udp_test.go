package socks

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// associated opens an association, and returns its conn and the address for datagrams.
func associated(t *testing.T, at string) (net.Conn, netip.AddrPort) {
	t.Helper()
	conn, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	io.WriteString(conn, "\x05\x01\x02\x01\x07kubevpn\x06secret\x05\x03\x00\x01\x00\x00\x00\x00\x00\x00")
	if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	code, to, err := readRequest(conn)
	if err != nil || code != replySucceeded {
		t.Fatalf("reply %d, %v", code, err)
	}
	return conn, netip.AddrPortFrom(netip.MustParseAddr(to.host), to.port)
}

func client(t *testing.T, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetReadDeadline(time.Now().Add(testTimeout)); err != nil {
		t.Fatal(err)
	}
	return c
}

func datagram(to endpoint, data string) []byte {
	return append(appendEndpoint([]byte{0, 0, 0}, to), data...)
}

func TestAssociationCarriesDatagrams(t *testing.T) {
	at, _ := serve(t)
	_, to := associated(t, at)
	c := client(t, to)
	for _, target := range []endpoint{{"dns.kube-system", 53}, {"10.96.0.10", 53}, {"fd00::1", 53}} {
		sent := datagram(target, "hello")
		c.Write(sent)
		got := make([]byte, 100)
		n, err := c.Read(got)
		if err != nil || !bytes.Equal(got[:n], sent) {
			t.Errorf("%v: got %q (%v), want %q", target, got[:n], err, sent)
		}
	}
}

func TestAssociationServesItsFirstSenderOnly(t *testing.T) {
	at, cluster := serve(t)
	_, to := associated(t, at)
	first, other := client(t, to), client(t, to)
	read := func(c *net.UDPConn) {
		t.Helper()
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	first.Write(datagram(endpoint{"a", 1}, "hello"))
	read(first)
	other.Write(datagram(endpoint{"b", 1}, "hello"))
	first.Write([]byte{0, 0, 1, addressIPv4, 1, 2, 3, 4, 0, 1}) // a fragment
	first.Write([]byte{0, 0})
	first.Write(datagram(endpoint{"a", 1}, "again")) // arrives after the others
	read(first)
	if n := cluster.dials.Load(); n != 1 {
		t.Errorf("%d targets", n)
	}
}

func TestAssociationEndsWithItsConn(t *testing.T) {
	at, _ := serve(t)
	conn, to := associated(t, at)
	conn.Close()
	testenv.Until(t, "the end of the association", func() bool {
		p, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(to))
		if err == nil {
			p.Close()
		}
		return err == nil
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("\x05\x01\x00\x01\x0a\x60\x00\x01\x00\x50"))
	f.Add([]byte("\x05\x03\x00\x03\x0bweb.default\x00\x50"))
	f.Add([]byte("\x00\x00\x00\x04" + string(make([]byte, 16)) + "\x00\x35data"))
	f.Add([]byte("\x01\x07kubevpn\x06secret"))
	f.Fuzz(func(t *testing.T, b []byte) {
		readPassword(bytes.NewReader(b))
		if _, to, err := readRequest(bytes.NewReader(b)); err == nil {
			again, err := readEndpoint(bytes.NewReader(appendEndpoint(nil, to)))
			if again != to || err != nil {
				t.Errorf("%q became %q (%v)", to, again, err)
			}
		}
		if to, data, ok := parseDatagram(b); ok && !bytes.HasSuffix(b, data) {
			t.Errorf("%q has %q for %q", b, data, to)
		}
	})
}
