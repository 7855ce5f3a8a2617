package netstack

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
)

// kernel is a laptop: a network namespace with a TUN device on which a Stack runs. Its addresses are 10.1.0.1 and
// fd01::1; 10.2.0.0/16 and fd02::/64 are the cluster.
type kernel struct {
	t     testing.TB
	ns    *tuntest.Namespace
	dev   tun.Device
	stack *Stack
}

const laptopMTU = 1500

func newKernel(t testing.TB, cfg Config) *kernel {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	k := &kernel{t: t, ns: tuntest.NewNamespace(t)}
	var f *os.File
	if err := k.ns.Do(func() (err error) { f, err = tun.Create("t0", laptopMTU); return err }); err != nil {
		t.Fatal(err)
	}
	var err error
	if k.dev, err = tun.Adopt(f, "t0", laptopMTU); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.dev.Close() })
	cfg.Device = k.dev
	k.stack = start(t, cfg)
	k.ns.Run("ip", "addr", "add", "10.1.0.1/24", "dev", "t0")
	k.ns.Run("ip", "addr", "add", "fd01::1/64", "dev", "t0", "nodad")
	k.ns.Run("ip", "link", "set", "t0", "up")
	k.ns.Run("ip", "route", "add", "10.2.0.0/16", "dev", "t0")
	k.ns.Run("ip", "route", "add", "fd02::/64", "dev", "t0")
	// The kernel sends from an IPv6 address before it accepts packets for it.
	testenv.Until(t, "fd01::1 is local", func() bool {
		out, _ := k.ns.Output("ip", "-6", "route", "show", "table", "local", "fd01::1")
		return out != ""
	})
	return k
}

// connect is the application's connect().
func (k *kernel) connect(network string, port uint16, timeout time.Duration) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return k.connectContext(ctx, network, port)
}

func (k *kernel) connectContext(ctx context.Context, network string, port uint16) (*net.TCPConn, error) {
	var c net.Conn
	err := k.ns.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, netip.AddrPortFrom(pod(network), port).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	conn := c.(*net.TCPConn)
	k.t.Cleanup(func() { conn.Close() })
	return conn, nil
}

func (k *kernel) mustConnect(network string, port uint16) *net.TCPConn {
	k.t.Helper()
	c, err := k.connect(network, port, 20*time.Second)
	if err != nil {
		k.t.Fatal(err)
	}
	return c
}

func eachFamily(t *testing.T, protocol string, test func(t *testing.T, network string)) {
	for _, family := range []string{"4", "6"} {
		t.Run("ipv"+family, func(t *testing.T) {
			test(t, protocol+family)
		})
	}
}

// wasReset reports whether the kernel has closed c. Before c has sent its FIN only an RST does that.
func wasReset(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	const closed = 7 // TCP_CLOSE of linux/tcp_states.h
	reset := false
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		reset = err == nil && info.State == closed
	})
	return reset
}
