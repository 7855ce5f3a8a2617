package router

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/host/unixsocket"
)

const podDevice = "kubevpn-pod"

// startInPod is start, with a network namespace in which the manager expects a gateway.
func startInPod(t *testing.T) (*running, *tuntest.Namespace) {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	pod := tuntest.NewNamespace(t)
	expected := listenIn(t, pod)
	r := start(t, expected)
	return r, pod
}

// listenIn listens for a gateway in a namespace.
func listenIn(t *testing.T, pod *tuntest.Namespace) (l net.Listener) {
	t.Helper()
	if err := pod.Do(func() (err error) {
		l, err = ListenGateways(t.Context(), api.GatewaySocket)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// testGateway plays the gateway.
type testGateway struct {
	t    testing.TB
	pod  *tuntest.Namespace
	conn *unixsocket.Conn
}

func dialGateway(t testing.TB, pod *tuntest.Namespace, before ...func() error) *testGateway {
	t.Helper()
	g := &testGateway{t: t, pod: pod}
	if err := pod.Do(func() error {
		for _, f := range before {
			if err := f(); err != nil {
				return err
			}
		}
		conn, err := net.Dial("unix", api.GatewaySocket)
		if err == nil {
			g.conn = unixsocket.NewConn(conn.(*net.UnixConn), maxGatewayMessage)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.conn.Close() })
	g.conn.SetDeadline(time.Now().Add(managertest.Timeout))
	return g
}

// networks reads the manager's next message.
func (g *testGateway) networks() []netip.Prefix {
	g.t.Helper()
	var networks api.GatewayNetworks
	if _, err := g.conn.Receive(&networks, ""); err != nil {
		g.t.Fatal(err)
	}
	return networks.Networks
}

// until reads messages until one has n networks.
func (g *testGateway) until(n int) []netip.Prefix {
	g.t.Helper()
	for {
		if networks := g.networks(); len(networks) == n {
			return networks
		}
	}
}

// ended waits until the manager has closed the connection.
func (g *testGateway) ended() {
	g.t.Helper()
	for {
		if _, err := g.conn.Receive(new(api.GatewayNetworks), ""); err != nil {
			if os.IsTimeout(err) {
				g.t.Fatal("the manager keeps the connection")
			}
			return
		}
	}
}

// device makes the TUN device, with the first address of 198.19.0.0/16, and hands it over.
func (g *testGateway) device(about string) {
	g.t.Helper()
	var f *os.File
	if err := g.pod.Do(func() (err error) {
		f, err = tun.Create(podDevice, 1450)
		return err
	}); err != nil {
		g.t.Fatal(err)
	}
	defer f.Close()
	g.pod.Run("ip", "addr", "add", "198.19.0.1/16", "dev", podDevice)
	g.pod.Run("ip", "link", "set", podDevice, "up")
	g.hand(about, f)
}

// hand sends a message in two pieces, with a file unless f is nil.
func (g *testGateway) hand(message string, f *os.File) {
	g.t.Helper()
	b := append(binary.BigEndian.AppendUint32(nil, uint32(len(message))), message...)
	if f != nil {
		if _, err := unixsocket.Send(g.conn.UnixConn, b[:3], f); err != nil {
			g.t.Fatal(err)
		}
		b = b[3:]
	}
	if _, err := g.conn.Write(b); err != nil {
		g.t.Fatal(err)
	}
}

func (g *testGateway) say(message string) {
	g.t.Helper()
	g.hand(message, nil)
}

func (g *testGateway) hasDevice() bool {
	_, err := g.pod.Output("ip", "link", "show", podDevice)
	return err == nil
}

const aboutGateway = `{"mtu":1450,"addrs":["198.19.0.1"],"ipv4":true,"ipv6":false,"backend":"nft","warnings":["w"]}`

func TestGatewayCarriesPacketsAndReportsItself(t *testing.T) {
	r, pod := startInPod(t)
	pod.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	pod.Run("ip", "link", "set", "eth1", "up")
	pod.Run("ip", "addr", "add", "10.244.1.5/24", "dev", "eth0")
	pod.Run("ip", "link", "set", "eth0", "up")

	g := dialGateway(t, pod)
	if networks := g.networks(); len(networks) != 0 {
		t.Errorf("networks without a laptop: %v", networks)
	}
	a := newInner(t, r, api.ClientHello{Client: "a", Netstack: api.NetstackSystem})
	if networks := g.until(2); !slices.Equal(networks, a.hello.Lease.Networks) {
		t.Errorf("networks %v, leased from %v", networks, a.hello.Lease.Networks)
	}
	g.device(aboutGateway)
	state := a.Until("gateway", func(s *api.ManagerState) bool { return s.Gateway != nil })
	if got := state.Gateway; got.MTU != 1450 || !slices.Equal(got.Addrs, managertest.Addrs("198.19.0.1")) || !got.IPv4 || got.IPv6 || got.Backend != "nft" || len(got.Warnings) != 1 {
		t.Errorf("gateway %+v", got)
	}

	// A program in the pod's network answers.
	var echo net.PacketConn
	if err := pod.Do(func() (err error) {
		echo, err = net.ListenPacket("udp4", "10.244.1.5:80")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for b := make([]byte, 2000); ; {
			n, from, err := echo.ReadFrom(b)
			if err != nil {
				return
			}
			echo.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() {
		echo.Close()
		<-served
	})
	dst := netip.MustParseAddr("10.244.1.5")
	exchange := func() {
		t.Helper()
		a.send(datagram(a.addrs[0], dst, 80, "request"))
		p := a.receive()
		h, err := packet.Parse(p)
		if err != nil || h.Src != dst || h.Dst != a.addrs[0] || h.Proto != packet.ProtoUDP || !bytes.HasSuffix(p, []byte("request")) {
			t.Errorf("%+v, %v: %x", h, err, p)
		}
	}
	exchange()

	// The kernel's own errors come too.
	closed := datagram(a.addrs[0], dst, 81, "nobody")
	a.send(closed)
	if p := a.receive(); p[packet.IPv4HeaderLen] != 3 || p[packet.IPv4HeaderLen+1] != 3 {
		t.Errorf("the answer of a closed port is %x", p)
	}

	// The latest state of the gateway counts.
	g.say(strings.Replace(aboutGateway, `"w"`, `"w","x"`, 1))
	a.Until("another warning", func(s *api.ManagerState) bool { return s.Gateway != nil && len(s.Gateway.Warnings) == 2 })
	exchange()

	// When the gateway ends, the manager closes the device and drops packets to it.
	g.conn.Close()
	a.Until("no gateway", func(s *api.ManagerState) bool { return s.Gateway == nil })
	testenv.Until(t, "the device's end", func() bool { return !g.hasDevice() })
	p := datagram(a.addrs[0], dst, 80, "request")
	a.send(p)
	unreachable(t, a.receive(), p, 3, 0)

	// The next gateway serves the connected laptops at once.
	g = dialGateway(t, pod)
	if networks := g.networks(); len(networks) != 2 {
		t.Errorf("networks %v", networks)
	}
	g.device(aboutGateway)
	a.Until("gateway", func(s *api.ManagerState) bool { return s.Gateway != nil })
	exchange()

	// A device that somebody removes ends the connection, so that the gateway can make another.
	pod.Run("ip", "link", "del", podDevice)
	g.ended()
	a.Until("no gateway", func(s *api.ManagerState) bool { return s.Gateway == nil })
}

// The manager accepts only a gateway of root, and only a TUN device.
func TestGatewayMustBeRootWithATUN(t *testing.T) {
	r, pod := startInPod(t)
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	tests := []struct {
		name   string
		before []func() error
		act    func(g *testGateway)
	}{
		{"not-root", []func() error{func() error {
			// This affects only the thread, which ends with the function.
			if _, _, err := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); err != 0 {
				return err
			}
			return nil
		}}, func(g *testGateway) {
			var sent api.GatewayNetworks
			if _, err := g.conn.Receive(&sent, ""); err == nil {
				t.Errorf("the manager sent it %+v", sent)
			}
		}},
		{"no-device", nil, func(g *testGateway) { g.say(aboutGateway) }},
		{"another-file", nil, func(g *testGateway) { g.hand(aboutGateway, file) }},
		{"no-json", nil, func(g *testGateway) { g.say("hello") }},
		{"too-long", nil, func(g *testGateway) { g.say(strings.Repeat(" ", maxGatewayMessage+1)) }},
		{"goes-at-once", nil, func(g *testGateway) { g.conn.CloseWrite() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := dialGateway(t, pod, tt.before...)
			g.t = t
			tt.act(g)
			g.ended()
			if gateway := r.router.routes.Load().gateway; gateway != nil {
				t.Errorf("the manager attached it: %+v", gateway.about)
			}
		})
	}
	// The manager serves the next gateway, and a second one waits for its end.
	g := dialGateway(t, pod)
	g.networks()
	g.device(aboutGateway)
	testenv.Until(t, "attaching", func() bool { return r.router.routes.Load().gateway != nil })
	second := dialGateway(t, pod)
	g.conn.Close()
	second.networks()
}

// The manager's end closes the device, and the gateway notices.
func TestManagerEndsBeforeGateway(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	pod := tuntest.NewNamespace(t)
	expected := listenIn(t, pod)
	g := dialGateway(t, pod)
	t.Run("manager", func(t *testing.T) {
		r := start(t, expected)
		g.networks()
		g.device(aboutGateway)
		testenv.Until(t, "attaching", func() bool { return r.router.routes.Load().gateway != nil })
	})
	g.ended()
	if g.hasDevice() {
		t.Error("the device is still there")
	}
}

func TestPodRoutesOmitGatewayDevice(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	pod := tuntest.NewNamespace(t)
	pod.Run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	pod.Run("ip", "link", "set", "eth1", "up")
	pod.Run("ip", "addr", "add", "10.244.1.5/24", "dev", "eth0")
	pod.Run("ip", "link", "set", "eth0", "up")
	pod.Run("ip", "route", "add", "198.18.0.0/16", "dev", "eth0")
	pod.Run("ip", "route", "add", "default", "via", "10.244.1.1")
	var got []netip.Prefix
	if err := pod.Do(func() error {
		f, err := tun.Create(podDevice, 1450)
		if err != nil {
			return err
		}
		defer f.Close()
		pod.Run("ip", "addr", "add", "198.19.0.1/16", "dev", podDevice)
		pod.Run("ip", "link", "set", podDevice, "up")
		got, err = PodRoutes()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	got = slices.DeleteFunc(got, func(p netip.Prefix) bool { return p.Addr().Is6() }) // fe80::/64
	slices.SortFunc(got, netip.Prefix.Compare)
	got = slices.DeleteFunc(got, func(p netip.Prefix) bool { return p.Bits() == 0 })
	if want := managertest.PrefixesOf("10.244.1.0/24", "198.18.0.0/16"); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
