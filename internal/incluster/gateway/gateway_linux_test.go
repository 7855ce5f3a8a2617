package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/host/unixsocket"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const timeout = time.Minute

var (
	network4 = netip.MustParsePrefix("198.19.0.0/16")
	network6 = netip.MustParsePrefix("fd50:1::/48")
	laptop4  = netip.MustParseAddr("198.19.3.7")
	laptop6  = netip.MustParseAddr("fd50:1::7")
	peer4    = netip.MustParseAddr("10.9.0.1")
	peer6    = netip.MustParseAddr("fd09::1")
)

// newPod makes a network namespace as a pod's: a link to another, of MTU 1400, with a default route of both families,
// and no forwarding. The other one has no route to laptops.
func newPod(t *testing.T) (pod, peer *tuntest.Namespace) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip", "iptables-nft", "iptables-legacy", "sh")
	pod, peer = tuntest.NewNamespace(t), tuntest.NewNamespace(t)
	var inside *os.File
	if err := peer.Do(func() (err error) { inside, err = os.Open("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	// ip wants the namespace by a path, and a program that we start has its own /proc/self.
	other := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), inside.Fd())
	pod.Run("ip", "link", "add", "eth0", "mtu", "1400", "type", "veth", "peer", "name", "eth0", "netns", other)
	for _, s := range []struct {
		ns     *tuntest.Namespace
		v4, v6 string
	}{{pod, "10.9.0.2/24", "fd09::2/64"}, {peer, peer4.String() + "/24", peer6.String() + "/64"}} {
		s.ns.Run("ip", "addr", "add", s.v4, "dev", "eth0")
		s.ns.Run("ip", "addr", "add", s.v6, "dev", "eth0", "nodad")
		s.ns.Run("ip", "link", "set", "eth0", "up")
	}
	peer.Run("ip", "link", "set", "eth0", "mtu", "1500")
	pod.Run("ip", "route", "add", "default", "via", peer4.String())
	pod.Run("ip", "route", "add", "default", "via", peer6.String())
	pod.Run("sh", "-c", "echo 0 >/proc/sys/net/ipv4/conf/all/forwarding; echo 0 >/proc/sys/net/ipv4/conf/default/forwarding; echo 0 >/proc/sys/net/ipv6/conf/all/forwarding")
	return pod, peer
}

// manager plays the traffic manager's part.
type manager struct {
	t        *testing.T
	listener *net.UnixListener
}

func newManager(t *testing.T, pod *tuntest.Namespace) *manager {
	t.Helper()
	m := &manager{t: t}
	if err := pod.Do(func() (err error) {
		m.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: api.GatewaySocket, Net: "unix"})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.listener.Close() })
	return m
}

func say(t *testing.T, conn *net.UnixConn, networks ...netip.Prefix) {
	t.Helper()
	if err := unixsocket.NewConn(conn, maxMessage).Send(api.GatewayNetworks{Networks: networks}, nil); err != nil {
		t.Fatal(err)
	}
}

// accept accepts a gateway, and receives its device.
func (m *manager) accept(networks ...netip.Prefix) (*net.UnixConn, tun.Device, api.Gateway) {
	m.t.Helper()
	m.listener.SetDeadline(time.Now().Add(timeout))
	conn, err := m.listener.AcceptUnix()
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { conn.Close() })
	say(m.t, conn, networks...)
	conn.SetReadDeadline(time.Now().Add(timeout))
	var state api.Gateway
	f, err := unixsocket.NewConn(conn, maxMessage).Receive(&state, device)
	if err != nil || f == nil {
		m.t.Fatalf("received %v, %v", f, err)
	}
	dev, err := tun.Adopt(f, device, state.MTU)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { dev.Close() })
	return conn, dev, state
}

// start runs a gateway in the pod. end ends it and returns what it returned.
func start(t *testing.T, pod *tuntest.Namespace, programs string) (end func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	g := &gateway{log: slog.New(slog.NewTextHandler(t.Output(), nil)), tun: tunPath, programs: programs}
	go func() { done <- pod.Do(func() error { return g.run(ctx) }) }()
	var result error
	ended := false
	end = func() error {
		cancel()
		if !ended {
			select {
			case result = <-done:
			case <-time.After(timeout):
				t.Error("the gateway has not ended")
			}
			ended = true
		}
		return result
	}
	t.Cleanup(func() { end() })
	return end
}

// onlyBackend returns a directory with the programs of one backend.
func onlyBackend(t *testing.T, backend string) string {
	dir := t.TempDir()
	for _, name := range []string{"iptables-" + backend, "ip6tables-" + backend} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// trace returns everything that a gateway changes, as programs show it.
func trace(t *testing.T, pod *tuntest.Namespace) string {
	t.Helper()
	out, err := pod.Output("sh", "-c", `ip -o link | sed 's/@.*//'; ip route | sed 's/ linkdown//'; ip -6 route | grep -v fe80 | sed 's/ linkdown//'; ip -o addr | grep -v fe80
for b in iptables-nft ip6tables-nft iptables-legacy ip6tables-legacy; do for t in nat mangle; do $b -t $t -S | grep KUBEVPN; done; done 2>&1 | grep -v '# Warning'
cat /proc/sys/net/ipv4/conf/eth0/forwarding /proc/sys/net/ipv6/conf/all/forwarding /proc/sys/net/ipv6/conf/eth0/accept_ra`)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return out
}

// eventually waits until the trace is want.
func eventually(t *testing.T, pod *tuntest.Namespace, want string) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for {
		got := trace(t, pod)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left (-want +got):\n%s", cmp.Diff(want, got))
		}
	}
}

func TestGatewayForwardsAndLeavesNothing(t *testing.T) {
	for _, backend := range backends {
		t.Run(backend, func(t *testing.T) {
			pod, peer := newPod(t)
			before := trace(t, pod)
			m := newManager(t, pod)
			end := start(t, pod, onlyBackend(t, backend))

			conn, dev, state := m.accept(network4, network6)
			want := api.Gateway{
				MTU: 1400, IPv4: true, IPv6: true, Backend: backend,
				Addrs: []netip.Addr{netip.MustParseAddr("198.19.0.1"), netip.MustParseAddr("fd50:1::1")},
			}
			if d := cmp.Diff(want, state, cmpopts.EquateComparable(netip.Addr{})); d != "" {
				t.Errorf("the gateway's line (-want +got):\n%s", d)
			}
			// peer has no route to the laptop: an answer proves that the pod has masqueraded the laptop's address.
			ping(t, dev, laptop4, peer4)
			ping(t, dev, laptop6, peer6)
			if mss := handshake(t, dev, peer, laptop4, peer4); mss != 1360 {
				t.Errorf("the MSS of peer's SYN-ACK is %d, want 1360, which fits the pod's MTU of 1400", mss)
			}

			deniesNewFlows(t, peer, dev, laptop4, peer4, "10.9.0.2", network4)
			deniesNewFlows(t, peer, dev, laptop6, peer6, "fd09::2", network6)

			// A laptop of another network sends before the gateway has its network. conntrack must not keep its flow as
			// one that is not masqueraded: the ping below belongs to the same flow.
			write(t, dev, netip.MustParseAddr("100.96.0.9"), peer4, packet.ProtoICMP, echoRequest(netip.MustParseAddr("100.96.0.9"), peer4))
			say(t, conn, netip.MustParsePrefix("100.96.0.0/16"))
			var other api.Gateway
			if _, err := unixsocket.NewConn(conn, maxMessage).Receive(&other, ""); err != nil || !slices.Equal(other.Addrs, []netip.Addr{netip.MustParseAddr("100.96.0.1")}) {
				t.Errorf("the gateway's message for other networks is %+v, %v", other, err)
			}
			waitFor(t, pod, "100.96.0.0/16 dev kubevpn0", "-s 100.96.0.0/16 ! -o kubevpn0", "-s 100.96.0.0/16 -i kubevpn0")
			ping(t, dev, netip.MustParseAddr("100.96.0.9"), peer4)
			if now := trace(t, pod); strings.Contains(now, "198.19.") || strings.Contains(now, "fd50:") {
				t.Errorf("the gateway kept removed networks:\n%s", now)
			}

			// When the manager ends the connection, the gateway removes everything. The next manager gets a new device.
			conn.Close()
			eventually(t, pod, before)
			conn, dev, _ = m.accept(network4)
			ping(t, dev, laptop4, peer4)
			// A manager that dies closes its descriptors in any order.
			dev.Close()
			conn.Close()
			eventually(t, pod, before)
			_, dev, _ = m.accept(network4)
			ping(t, dev, laptop4, peer4)

			// The gateway ends while the manager still has everything.
			if err := end(); err != nil {
				t.Errorf("the gateway ended with %v", err)
			}
			if d := cmp.Diff(before, trace(t, pod)); d != "" {
				t.Errorf("left (-want +got):\n%s", d)
			}
		})
	}
}

// waitFor waits until the trace contains all of want.
func waitFor(t *testing.T, pod *tuntest.Namespace, want ...string) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for {
		got := trace(t, pod)
		if !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(got, w) }) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not all of %q are in\n%s", want, got)
		}
	}
}

// A gateway that was killed has removed nothing, and the manager may not have closed the device.
func TestGatewayRemovesWhatKilledOneLeft(t *testing.T) {
	pod, _ := newPod(t)
	before := trace(t, pod)
	log := slog.New(slog.DiscardHandler)
	if err := pod.Do(func() error {
		firewall, err := openFirewall(onlyBackend(t, "nft"), log)
		if err != nil {
			return err
		}
		n, file, err := openNetwork(firewall, log)
		if err != nil {
			return err
		}
		t.Cleanup(func() { file.Close() })
		return n.set([]netip.Prefix{network4})
	}); err != nil {
		t.Fatal(err)
	}
	if now := trace(t, pod); !strings.Contains(now, natChain) || !strings.Contains(now, device) {
		t.Fatalf("the killed gateway left nothing, so the test proves nothing:\n%s", now)
	}
	end := start(t, pod, programs)
	m := newManager(t, pod)
	_, dev, _ := m.accept(network4)
	ping(t, dev, laptop4, peer4)
	if err := end(); err != nil {
		t.Error(err)
	}
	// Forwarding that the killed gateway turned on stays on, because no process knows that it was off.
	without := func(s string) []string {
		return slices.DeleteFunc(strings.Split(s, "\n"), func(l string) bool { return l == "0" || l == "1" || l == "2" })
	}
	if d := cmp.Diff(without(before), without(trace(t, pod))); d != "" {
		t.Errorf("left (-want +got):\n%s", d)
	}
}

func TestSecondGatewayInPodFails(t *testing.T) {
	pod, _ := newPod(t)
	m := newManager(t, pod)
	start(t, pod, programs)
	_, dev, _ := m.accept(network4)
	err := pod.Do(func() error {
		return (&gateway{log: slog.New(slog.DiscardHandler), tun: tunPath, programs: programs}).run(t.Context())
	})
	if err == nil || !strings.Contains(err.Error(), "another gateway") {
		t.Errorf("a second one: %v", err)
	}
	ping(t, dev, laptop4, peer4)
}

func TestGatewayFailsWhenContainerCannotServe(t *testing.T) {
	pod, _ := newPod(t)
	for _, tt := range []struct {
		name string
		g    gateway
		code api.ExitCode
		want string
	}{
		{"no_device_directory", gateway{tun: "/proc/none/tun", programs: programs}, api.ExitNoTUN, "/proc/none/tun"},
		{"no_iptables", gateway{tun: tunPath, programs: t.TempDir()}, api.ExitNetwork, "no iptables backend"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.g.log = slog.New(slog.DiscardHandler)
			err := pod.Do(func() error { return tt.g.run(t.Context()) })
			if e := api.AsError(err); e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.want) {
				t.Errorf("%+v, want code %d and %q", e, tt.code, tt.want)
			}
		})
	}
}

func TestEnsureTUNCreatesDeviceFile(t *testing.T) {
	testenv.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "net", "tun")
	for range 2 { // the first call creates it, the second one finds it
		if err := ensureTUN(path); err != nil {
			t.Fatal(err)
		}
	}
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil || s.Mode != unix.S_IFCHR|0o600 || unix.Major(s.Rdev) != 10 || unix.Minor(s.Rdev) != 200 {
		t.Errorf("%+v, %v", s, err)
	}
}

// openFirewall rejects a backend that does not list the rules that it has added.
func TestFirewallSkipsBackendWithoutEffect(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		script := "#!/bin/sh\n[ \"$1\" = --version ] && echo 'iptables v1.8.9 (nf_tables)'\nexit 0\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	_, err := openFirewall(dir, slog.New(slog.DiscardHandler))
	if e := api.AsError(err); e == nil || e.Code != api.ExitNetwork || strings.Count(e.Message, "does not list") != 2 {
		t.Errorf("%v", err)
	}
}

func TestCheckRejectsNetworksThatAreNotForLaptops(t *testing.T) {
	for _, tt := range []struct{ network, want string }{
		{"198.19.0.0/16", ""}, {"198.18.0.0/16", ""}, {"100.96.0.0/16", ""}, {"10.219.0.0/16", ""}, {"10.0.0.0/8", "for laptops"}, {"fd50:1::/48", ""},
		{"0.0.0.0/0", "for laptops"}, {"::/0", "for laptops"}, {"8.8.8.0/24", "for laptops"}, {"127.0.0.0/8", "for laptops"}, {"198.0.0.0/8", "for laptops"},
		{"169.254.0.0/16", "for laptops"}, {"2001:db8::/32", "for laptops"}, {"198.19.0.1/16", "not a network"}, {"::ffff:10.0.0.0/104", "not a network"},
		{"10.219.0.0/31", "too small"}, {"10.219.0.1/32", "too small"},
	} {
		t.Run(strings.NewReplacer("/", "-", ":", "_").Replace(tt.network), func(t *testing.T) {
			err := check([]netip.Prefix{netip.MustParsePrefix(tt.network)})
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
	if err := check(make([]netip.Prefix, 65)); err == nil {
		t.Error("check accepted 65 networks")
	}
	if err := check([]netip.Prefix{{}}); err == nil {
		t.Error("check accepted the zero Prefix")
	}
}

func TestNextRejectsInvalidMessages(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"nothing", "", "<nil> <nil>"},
		{"garbage", "\x00\x00\x00\x01{", "cannot read from the traffic manager"},
		{"not_a_prefix", "\x00\x00\x00\x12" + `{"networks":["x"]}`, "cannot read from the traffic manager"},
		{"too_long", "\x00\x01\x00\x01", "more than the limit of 65536"},
		{"cut_off", "\x00\x00\x00\x02{", "unexpected EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file, other, err := unixsocket.Pair("test")
			if err != nil {
				t.Fatal(err)
			}
			conn, err := unixsocket.Open(file, maxMessage)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := other.WriteString(tt.text); err != nil {
				t.Fatal(err)
			}
			other.Close()
			networks, err := next(conn)
			if got := fmt.Sprint(networks, err); !strings.Contains(got, tt.want) {
				t.Errorf("%s, want %q", got, tt.want)
			}
		})
	}
}

// ping sends an echo request into the device and waits for the answer.
func ping(t *testing.T, dev tun.Device, src, dst netip.Addr) {
	t.Helper()
	reply, proto := byte(0), uint8(packet.ProtoICMP)
	if src.Is6() {
		reply, proto = 129, packet.ProtoICMPv6
	}
	echo := echoRequest(src, dst)
	write(t, dev, src, dst, proto, echo)
	got := readTo(t, dev, dst, src)
	if got[0] != reply || !bytes.Equal(got[4:], echo[4:]) {
		t.Errorf("%v answers %x", dst, got)
	}
}

// deniesNewFlows sends to a laptop through the pod, as a pod of the same node can with the capability NET_RAW. The
// laptop's own flows continue: its next packet from peer is the answer to its ping.
func deniesNewFlows(t *testing.T, peer *tuntest.Namespace, dev tun.Device, laptop, from netip.Addr, pod string, network netip.Prefix) {
	t.Helper()
	peer.Run("ip", "route", "add", network.String(), "via", pod)
	defer peer.Run("ip", "route", "del", network.String())
	if err := peer.Do(func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(laptop, 5353)))
		if err != nil {
			return err
		}
		_, err = conn.Write([]byte("a new flow"))
		return errors.Join(err, conn.Close())
	}); err != nil {
		t.Fatal(err)
	}
	ping(t, dev, laptop, from)
}

// echoRequest returns a request. All requests between two addresses belong to the same flow.
func echoRequest(src, dst netip.Addr) []byte {
	echo := []byte{8, 0, 0, 0, 0x12, 0x34, 0, 1, 'h', 'i'}
	var pseudo []byte
	if src.Is6() {
		echo[0] = 128
		pseudo = pseudoHeader(src, dst, len(echo), packet.ProtoICMPv6)
	}
	binary.BigEndian.PutUint16(echo[2:], checksum(pseudo, echo))
	return echo
}

// handshake sends a SYN into the device and returns the MSS of the answer. The answer leaves peer with a larger MSS
// than the path allows.
func handshake(t *testing.T, dev tun.Device, peer *tuntest.Namespace, src, dst netip.Addr) uint16 {
	t.Helper()
	var listener net.Listener
	if err := peer.Do(func() (err error) { listener, err = net.Listen("tcp", dst.String()+":0"); return err }); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	port := listener.Addr().(*net.TCPAddr).Port
	syn := make([]byte, 24)
	binary.BigEndian.PutUint16(syn, 4000)
	binary.BigEndian.PutUint16(syn[2:], uint16(port))
	syn[12], syn[13] = 6<<4, 2
	binary.BigEndian.PutUint16(syn[14:], 65535)
	copy(syn[20:], []byte{2, 4, 0xff, 0xd7})
	binary.BigEndian.PutUint16(syn[16:], checksum(pseudoHeader(src, dst, len(syn), packet.ProtoTCP), syn))
	write(t, dev, src, dst, packet.ProtoTCP, syn)
	got := readTo(t, dev, dst, src)
	if got[13] != 0x12 {
		t.Fatalf("the answer to a SYN is %x", got)
	}
	for options := got[20 : int(got[12]>>4)*4]; len(options) > 3; {
		switch options[0] {
		case 2:
			return binary.BigEndian.Uint16(options[2:])
		case 1:
			options = options[1:]
		default:
			options = options[options[1]:]
		}
	}
	t.Fatalf("no MSS in %x", got)
	return 0
}

func write(t *testing.T, dev tun.Device, src, dst netip.Addr, proto uint8, payload []byte) {
	t.Helper()
	ip := packet.Outgoing{Src: src, Dst: dst, Proto: proto, PayloadLen: len(payload)}
	if err := dev.Writev([][]byte{make([]byte, packet.VirtioLen), ip.Append(nil), payload}); err != nil {
		t.Fatal(err)
	}
}

// readTo reads the next packet from src to dst. The kernel sends others of its own.
func readTo(t *testing.T, dev tun.Device, src, dst netip.Addr) []byte {
	t.Helper()
	dev.(interface{ SetReadDeadline(time.Time) error }).SetReadDeadline(time.Now().Add(timeout))
	buf := make([]byte, tun.MinRead)
	for {
		n, err := dev.Read(buf)
		if err != nil {
			t.Fatalf("waiting for what %v says to %v: %v", src, dst, err)
		}
		h, err := packet.Parse(buf[packet.VirtioLen:n])
		if err != nil {
			t.Fatal(err)
		}
		if h.Src == src && h.Dst == dst {
			return buf[packet.VirtioLen:n][h.HeaderLen:h.Len]
		}
	}
}

func pseudoHeader(src, dst netip.Addr, n int, proto byte) []byte {
	b := append(src.AsSlice(), dst.AsSlice()...)
	return append(binary.BigEndian.AppendUint32(b, uint32(n)), 0, 0, 0, proto)
}

func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, p := range parts { // each of even length
		for i := 0; i < len(p); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(p[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
