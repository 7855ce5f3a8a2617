//go:build e2e && linux

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// place is the node and the network namespace of a pod.
type place struct {
	w         *world
	node, uid string
	addr      netip.Addr
}

// placeOf finds a pod by its address.
func (w *world) placeOf(t *testing.T, addr netip.Addr) place {
	t.Helper()
	for line := range strings.Lines(w.kubectl(t, "get", "pods", "-A", "--field-selector=status.phase=Running",
		"-o", `jsonpath={range .items[*]}{.status.podIP} {.spec.nodeName} {.metadata.uid}{"\n"}{end}`)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == addr.String() {
			return place{w, strings.TrimPrefix(f[1], w.Config().Name+"-"), f[2], addr}
		}
	}
	t.Fatalf("no pod has %v", addr)
	return place{}
}

// command prepares a program of the node that runs in the pod's network namespace.
func (p place) command(ctx context.Context, t *testing.T, argv ...string) *exec.Cmd {
	t.Helper()
	cmd, err := p.w.Command(ctx, p.node, append([]string{"sh", "-c", `
		for d in /proc/[0-9]*; do
			if grep -qs "pod$0" "$d/cgroup"; then exec nsenter --net="$d/ns/net" -- "$@"; fi
		done
		echo "no process of pod $0" >&2
		exit 1`, p.uid}, argv...)...)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

func (p place) must(t *testing.T, argv ...string) string {
	t.Helper()
	return output(t, p.command(context.WithoutCancel(t.Context()), t, argv...)) // usable in a cleanup too
}

// onNode runs a command on the pod's node.
func (p place) onNode(t *testing.T, argv ...string) string {
	t.Helper()
	cmd, err := p.w.Command(context.WithoutCancel(t.Context()), p.node, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return output(t, cmd)
}

func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v: %s", cmd.Args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// serve runs a Python script in the pod's network namespace until the test ends. It returns when the script is ready;
// said yields the lines that the script prints afterwards.
func (p place) serve(t *testing.T, script string, args ...string) (said *bufio.Scanner) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd := p.command(ctx, t, append([]string{"python3", "-u", "-c", script}, args...)...)
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, in
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		in.CloseWithError(cmd.Wait())
	}()
	t.Cleanup(func() {
		cancel()
		out.Close()
		<-ended
	})
	said = bufio.NewScanner(out)
	if !said.Scan() || said.Text() != "ready" {
		t.Fatalf("the server in the pod says %q, %v", said.Text(), said.Err())
	}
	return said
}

// shrink sets the MTU of both ends of the pod's link until the test ends.
func (p place) shrink(t *testing.T, mtu string) {
	t.Helper()
	fields := strings.Fields(p.onNode(t, "ip", "-o", "route", "get", p.addr.String()))
	link := ""
	for i, f := range fields {
		if f == "dev" {
			link = fields[i+1]
		}
	}
	set := func(mtu string) {
		p.must(t, "ip", "link", "set", "eth0", "mtu", mtu)
		p.onNode(t, "ip", "link", "set", link, "mtu", mtu)
	}
	_, before, _ := strings.Cut(p.must(t, "ip", "-o", "link", "show", "eth0"), " mtu ")
	set(mtu)
	t.Cleanup(func() { set(strings.Fields(before)[0]) })
}

// packetsSuite sends whole packets of any protocol, and checks the errors of routers.
func packetsSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	c := l.connection(t)
	gateway := w.placeOf(t, netip.MustParseAddr(w.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.status.podIP}")))
	// Prefer a pod on another node than the gateway, for a longer path.
	var far place
	for _, addr := range w.pods(t, "default", "app=web") {
		if far = w.placeOf(t, addr); far.node != gateway.node {
			break
		}
	}
	pod := far.addr.String()

	t.Run("datagram_of_64_KiB_in_fragments", func(t *testing.T) {
		r := l.run(t, "python3", "-c", fragmentsScript, pod)
		if strings.TrimSpace(r.stdout) != "True True True" {
			t.Errorf("want true for: the same data came back, fragments were sent, fragments were received: %v", r)
		}
	})
	t.Run("ping_of_64_KiB", func(t *testing.T) {
		l.must(t, "ping", "-n", "-c", "2", "-i", "0.2", "-s", "65507", "-W", "3", pod)
	})
	t.Run("traceroute_shows_the_hops", func(t *testing.T) {
		var first netip.Addr
		for _, p := range c.CIDRs {
			if p.Contains(c.Addresses[0]) {
				first = p.Addr().Next() // the device in the traffic manager's pod
			}
		}
		podNode := func(p place) int { return int(p.node[len(p.node)-1] - '0') }
		f := w.Config().Families()[0]
		for _, probe := range []string{"udp", "icmp"} {
			t.Run(probe, func(t *testing.T) {
				var hops []netip.Addr
				if err := json.Unmarshal([]byte(l.must(t, "python3", "-c", tracerouteScript, probe, pod)), &hops); err != nil {
					t.Fatal(err)
				}
				if len(hops) < 2 || !f.PodRange(podNode(gateway)).Contains(hops[1]) && hops[1] != f.Node(podNode(gateway)) {
					t.Fatalf("hops %v, and the second is not the gateway's node", hops)
				}
				want := []netip.Addr{first, hops[1]}
				if far.node != gateway.node {
					want = append(want, f.Node(podNode(far)))
				}
				if d := cmp.Diff(fmt.Sprint(append(want, far.addr)), fmt.Sprint(hops)); d != "" {
					t.Errorf("hops (-want +got):\n%s", d)
				}
			})
		}
	})
	t.Run("sctp_passes", func(t *testing.T) {
		said := far.serve(t, sctpScript, "serve")
		r := l.run(t, "python3", "-c", sctpScript, pod)
		if strings.TrimSpace(r.stdout) != "INIT ACK from "+pod {
			t.Error(r)
		}
		if !said.Scan() || said.Text() != "INIT from "+gateway.addr.String() {
			t.Errorf("the pod says %q", said.Text())
		}
	})
	t.Run("unknown_protocol_passes", func(t *testing.T) {
		said := far.serve(t, protocolScript, "serve")
		r := l.run(t, "python3", "-c", protocolScript, pod)
		if strings.TrimSpace(r.stdout) != "hello, pod from "+pod {
			t.Error(r)
		}
		if !said.Scan() || said.Text() != "hello from "+gateway.addr.String() {
			t.Errorf("the pod says %q", said.Text())
		}
	})
	t.Run("path_mtu", func(t *testing.T) {
		far.shrink(t, "1300")
		t.Run("too_large_packet_gets_an_error", func(t *testing.T) {
			if r := l.run(t, "python3", "-c", tooLargeScript, pod); strings.TrimSpace(r.stdout) != "EMSGSIZE by ICMP 3/4, MTU 1300, the socket's 1300" {
				t.Error(r)
			}
		})
		t.Run("bulk_transfer_completes", func(t *testing.T) {
			far.serve(t, bulkScript, "serve", "9111")
			if r := l.run(t, "python3", "-c", bulkScript, pod, "9111"); !strings.HasSuffix(strings.TrimSpace(r.stdout), "whole") {
				t.Error(r)
			}
		})
	})
	t.Run("mss_fits_the_gateway_s_path", func(t *testing.T) {
		// Neither end knows about the 1200 bytes, because both devices have an MTU of 1500 and no router reports it.
		route := strings.Fields(gateway.must(t, "ip", "route", "show", "default"))
		gateway.must(t, append([]string{"ip", "route", "replace"}, append(route, "mtu", "1200")...)...)
		t.Cleanup(func() { gateway.must(t, append([]string{"ip", "route", "replace"}, route...)...) })
		said := far.serve(t, bulkScript, "serve", "9112")
		r := l.run(t, "python3", "-c", bulkScript, pod, "9112")
		// TCP's timestamps take 12 of the 1160 bytes.
		if strings.TrimSpace(r.stdout) != "MSS 1148\nwhole" {
			t.Errorf("the laptop: %v", r)
		}
		if !said.Scan() || said.Text() != "MSS 1148" {
			t.Errorf("the pod says %q", said.Text())
		}
	})
	t.Run("gateway_leaves_nothing_on_the_node", func(t *testing.T) {
		// The gateway's configuration is in the pod's network namespace and ends with it; the node has none of it.
		c := l.connection(t)
		node := w.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.spec.nodeName}")
		place := node[strings.LastIndex(node, "-")+1:]
		rules := func() string {
			cmd, err := w.Command(t.Context(), place, "sh", "-c", "iptables-save; ip6tables-save; nft list ruleset; ip -o link")
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			return string(out)
		}
		if out := rules(); strings.Contains(strings.ToUpper(out), "KUBEVPN") {
			t.Errorf("kubevpn configuration is left on the node:\n%s", out)
		}
		w.kubectl(t, "-n", c.ManagerNamespace, "delete", "pod", c.ManagerPod, "--grace-period=0", "--force")
		testenv.Eventually(t, 60*time.Second, func() error {
			_, err := l.get(t, "http://"+pod+":8080/")
			return err
		})
		if c := l.connection(t); c.Netstack != "system" {
			t.Errorf("after the manager was replaced the netstack is %q: %s", c.Netstack, c.NetstackReason)
		}
		if out := rules(); strings.Contains(strings.ToUpper(out), "KUBEVPN") {
			t.Errorf("kubevpn configuration is left on the node:\n%s", out)
		}
	})
}

// fragmentsScript sends the largest datagram and expects it back.
const fragmentsScript = `
import socket, sys
def counted(name):
    names, values = [l.split()[1:] for l in open("/proc/self/net/snmp") if l.startswith("Ip:")]
    return int(values[names.index(name)])
created, joined = counted("FragCreates"), counted("ReasmOKs")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
s.settimeout(5)
sent = bytes(i % 251 for i in range(65507))
s.sendto(sent, (sys.argv[1], 9001))
same = s.recv(65536) == sent
print(same, counted("FragCreates") - created >= 40, counted("ReasmOKs") - joined >= 1)
`

// tracerouteScript prints the senders of the replies to packets of rising TTL, up to the destination.
const tracerouteScript = `
import json, select, socket, struct, sys
kind, dst = sys.argv[1:]
IP_RECVERR, MSG_ERRQUEUE = 11, 0x2000
def probe(ttl, attempt):
    if kind == "udp":
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        data, port = b"probe", 33434 + ttl
    else:
        s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        data, port = struct.pack("!BBHHH", 8, 0, 0, 0x4b56, ttl * 8 + attempt), 0
        check = sum_of(data)
        data = data[:2] + struct.pack("!H", check) + data[4:]
    with s:
        s.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
        s.connect((dst, port))
        s.send(data)
        p = select.poll()
        p.register(s, select.POLLIN | select.POLLERR)
        for _ in range(8):
            for _, event in p.poll(1500):
                if event & select.POLLERR:
                    _, control, _, _ = s.recvmsg(512, 512, MSG_ERRQUEUE)
                    for level, typ, body in control:
                        if level == socket.IPPROTO_IP and typ == IP_RECVERR:
                            return socket.inet_ntoa(body[20:24])
                elif s.recv(512)[20] == 0: # an echo reply
                    return dst
def sum_of(data):
    n = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    n = (n >> 16) + (n & 0xffff)
    return ~((n >> 16) + n) & 0xffff
hops = []
for ttl in range(1, 9):
    # A kernel tells one asker only so often.
    hop = next(filter(None, (probe(ttl, attempt) for attempt in range(4))), "0.0.0.0")
    hops.append(hop)
    if hop == dst:
        break
print(json.dumps(hops))
`

// sctpScript plays both ends of the start of an SCTP association (RFC 9260, 3.3.2 and 3.3.3).
const sctpScript = `
import socket, struct, sys
def crc32c(data):
    crc = 0xffffffff
    for b in data:
        crc ^= b
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff
def packet(sport, dport, tag, kind, body):
    chunk = struct.pack("!BBH", kind, 0, 4 + len(body)) + body
    head = struct.pack("!HHI", sport, dport, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + chunk)) + chunk
def parse(ip):
    p = ip[(ip[0] & 15) * 4:]
    sport, dport, tag = struct.unpack("!HHI", p[:8])
    right = struct.unpack("<I", p[8:12])[0] == crc32c(p[:8] + bytes(4) + p[12:])
    return sport, dport, tag, p[12], struct.unpack("!I", p[16:20])[0], right
def body(tag):
    return struct.pack("!IIHHI", tag, 65536, 10, 10, 1)
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 132)
s.settimeout(8)
if sys.argv[1] == "serve":
    s.settimeout(60)
    print("ready")
    while True:
        data, (peer, _) = s.recvfrom(4096)
        sport, dport, _, kind, init, right = parse(data)
        if dport == 5001 and kind == 1 and right:
            cookie = struct.pack("!HH4s", 7, 8, b"kvpn")
            s.sendto(packet(dport, sport, init, 2, body(77) + cookie), (peer, 0))
            print("INIT from", peer)
else:
    for _ in range(3):
        s.sendto(packet(5000, 5001, 0, 1, body(0x1234)), (sys.argv[1], 0))
        try:
            data, (peer, _) = s.recvfrom(4096)
        except TimeoutError:
            continue
        sport, dport, tag, kind, _, right = parse(data)
        if (sport, dport, tag, kind, right) == (5001, 5000, 0x1234, 2, True):
            print("INIT ACK from", peer)
            break
        print("got", sport, dport, tag, kind, right)
`

// protocolScript plays both ends of an experimental protocol (RFC 3692).
const protocolScript = `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 253)
if sys.argv[1] == "serve":
    s.settimeout(60)
    print("ready")
    while True:
        data, (peer, _) = s.recvfrom(4096)
        s.sendto(data[20:] + b", pod", (peer, 0))
        print(data[20:].decode(), "from", peer)
else:
    s.settimeout(5)
    s.sendto(b"hello", (sys.argv[1], 0))
    data, (peer, _) = s.recvfrom(4096)
    print(data[20:].decode(), "from", peer)
`

// tooLargeScript sends a datagram that must not be fragmented, and waits for the error.
const tooLargeScript = `
import errno, select, socket, struct, sys
IP_MTU_DISCOVER, IP_RECVERR, IP_MTU, IPV6_MTU_DISCOVER, IPV6_RECVERR, MSG_ERRQUEUE = 10, 11, 14, 23, 25, 0x2000
v6 = ":" in sys.argv[1]
family, level, discover, recverr, size = (socket.AF_INET6, socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_RECVERR, 1440) if v6 else (
    socket.AF_INET, socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_RECVERR, 1400)
s = socket.socket(family, socket.SOCK_DGRAM)
s.setsockopt(level, discover, 2)
s.setsockopt(level, recverr, 1)
s.connect((sys.argv[1], 9001))
s.send(bytes(size))
p = select.poll()
p.register(s, select.POLLERR)
if not p.poll(5000):
    sys.exit("no error came")
_, control, _, _ = s.recvmsg(2048, 512, MSG_ERRQUEUE)
number, origin, kind, code, _, info, _ = struct.unpack("=IBBBBII", control[0][2][:16])
said = [errno.errorcode[number], "by", {2: "ICMP", 3: "ICMPv6"}.get(origin, origin), "%d/%d," % (kind, code), "MTU %d" % info]
if not v6:
    said[-1] += ", the socket's %d" % s.getsockopt(level, IP_MTU)
print(*said)
`

// bulkScript plays both ends of a bulk transfer in both directions.
const bulkScript = `
import hashlib, socket, sys
SIZE = 8 << 20
data = bytes(range(256)) * (SIZE >> 8)
def take(c):
    h, n = hashlib.sha256(), 0
    while n < SIZE:
        b = c.recv(1 << 16)
        if not b:
            break
        h.update(b)
        n += len(b)
    return h.digest() == hashlib.sha256(data).digest()
if sys.argv[1] == "serve":
    s = socket.create_server(("0.0.0.0", int(sys.argv[2])))
    print("ready")
    c, _ = s.accept()
    c.settimeout(20)
    print("MSS", c.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
    if take(c):
        c.sendall(data)
    c.close()
else:
    c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    c.settimeout(20)
    print("MSS", c.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
    c.sendall(data)
    print("whole" if take(c) else "not whole")
`
