package dial

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/wire/transport"
)

// inNamespace runs f in a network namespace of its own, where ICMP sockets are permitted to groups (the kernel's
// default is "1 0", to none), and veth0 has 10.99.0.1/24 and fd99::1/64, with nobody at the other end.
func inNamespace(t *testing.T, groups string, f func()) {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
	ns := tuntest.NewNamespace(t)
	for _, args := range []string{
		"link add veth0 type veth peer name veth1",
		"link set veth0 up",
		"link set veth1 up",
		"addr add 10.99.0.1/24 dev veth0",
		"addr add fd99::1/64 dev veth0 nodad",
	} {
		ns.Run("ip", strings.Fields(args)...)
	}
	err := ns.Do(func() error {
		for name, value := range map[string]string{
			"ipv4/ping_group_range": groups,
			// With these, the kernel soon reports that an address has no host.
			"ipv4/neigh/veth0/retrans_time_ms": "50",
			"ipv6/neigh/veth0/retrans_time_ms": "50",
		} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
				return err
			}
		}
		f()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// laptopPings implements packets in memory.
type laptopPings struct {
	out, in chan []byte
	code    chan transport.Code
	done    chan struct{}
}

func newLaptopPings() *laptopPings {
	return &laptopPings{make(chan []byte, 10), make(chan []byte, 10), make(chan transport.Code, 10), make(chan struct{})}
}

func (l *laptopPings) Wait() error {
	select {
	case p := <-l.out:
		l.out <- p
		return nil
	case <-l.done:
		return io.EOF
	}
}

func (l *laptopPings) ReadPackets(b []byte, sizes []int) (int, error) {
	sizes[0] = copy(b, <-l.out)
	return 1, nil
}

func (l *laptopPings) TryWritePackets(b []byte, size int) (int, error) {
	if len(b) > size {
		return 0, nil // one at a time
	}
	return 1, l.WritePacket(b)
}

func (l *laptopPings) WritePacket(b []byte) error {
	l.in <- append([]byte(nil), b...)
	return nil
}

func (l *laptopPings) CloseWithCode(c transport.Code) error {
	select {
	case <-l.done:
	default:
		l.code <- c
		close(l.done)
	}
	return nil
}

func TestPingReturnsReplyOrError(t *testing.T) {
	tests := []struct {
		name, dst string
		want      string // "reply" or the code
	}{
		{"answers", "127.0.0.1", "reply"},
		{"answers6", "::1", "reply"},
		{"nobody-there", "10.99.0.2", "host unreachable"},
		{"nobody-there6", "fd99::2", "host unreachable"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var p datagrams
			var err error
			inNamespace(t, "0 2147483647", func() { p, err = openPinger(netip.MustParseAddr(tt.dst)) })
			if err != nil {
				t.Fatal(err)
			}
			l := newLaptopPings()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				exchange(l, p, echoIdle, &buffers{})
			}()
			message := binary.BigEndian.AppendUint16(nil, 7)
			l.out <- append(message, "payload"...)
			select {
			case reply := <-l.in:
				if string(reply) != "\x00\x07payload" {
					t.Errorf("reply %q", reply)
				}
				if tt.want != "reply" {
					t.Errorf("got a reply from an address without a host")
				}
				l.CloseWithCode(transport.CodeOK)
			case c := <-l.code:
				if c.String() != tt.want {
					t.Errorf("ended with %v, want %s", c, tt.want)
				}
			case <-time.After(managertest.Timeout):
				t.Fatal("neither a reply nor an end")
			}
			<-ended
		})
	}
}

func TestPingFailsWhenNotPermitted(t *testing.T) {
	var may bool
	var err error
	inNamespace(t, "1 0", func() {
		may = MayPing()
		_, err = openPinger(netip.MustParseAddr("127.0.0.1"))
	})
	if may || transport.CodeOf(err) != transport.CodeProhibited {
		t.Errorf("permitted: %v, error: %v", may, err)
	}
}

func TestPingToServiceIsSilent(t *testing.T) {
	r := identified(t, "")
	r.vip("127.0.0.1:1")
	p := managertest.OpenPackets(t, r.laptop, transport.ProtoEcho, "10.96.0.1:0")
	if _, err := p.ReadPacket(make([]byte, 10)); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("got %v", err)
	}
}

// TestNodeServes dials a ClusterIP that is an address of this "node", as with IPVS, one that accepts connections and
// drops pings, as with the other modes, and one that nobody serves.
func TestNodeServes(t *testing.T) {
	testenv.NeedPrograms(t, "nft")
	const vip = "10.99.0.1"
	got := map[string]string{}
	inNamespace(t, "0 2147483647", func() {
		listener, err := net.Listen("tcp", vip+":0")
		if err != nil {
			t.Error(err)
			return
		}
		defer listener.Close()
		to := netip.MustParseAddrPort(listener.Addr().String())
		serves := func(vip netip.AddrPort) string { return NodeServes(t.Context(), vip) }
		got["unknown"] = serves(netip.AddrPort{})
		got["ipvs"] = serves(to)
		if out, err := exec.Command("nft", "add table ip t; add chain ip t in { type filter hook input priority 0; }; "+
			"add rule ip t in ip protocol icmp drop").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		got["others"] = serves(to)
		if out, err := exec.Command("nft", "flush chain ip t in; add rule ip t in icmp type echo-request reject").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		got["ipvs that rejects pings"] = serves(to)
		got["nobody"] = serves(netip.MustParseAddrPort("10.99.0.2:443"))
	})
	want := map[string]string{"unknown": "", "ipvs": api.NodeServesAsAddress, "ipvs that rejects pings": api.NodeServesAsAddress,
		"others": api.NodeServesClusterIP, "nobody": api.NodeServesNothing}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
