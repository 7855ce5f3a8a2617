package connection

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/host/sockets"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"

	corev1 "k8s.io/api/core/v1"
)

var (
	laptopPort = netip.MustParseAddrPort("198.19.0.2:40000")
	webService = netip.MustParseAddrPort("10.96.0.80:80")
)

// accepting returns a connection whose manager accepts every stream.
func accepting(t *testing.T) (c *Connection, accepted chan *transport.Stream) {
	t.Helper()
	c, accepted = newTestConnection(t), make(chan *transport.Stream, 1)
	laptop, manager := transporttest.Pair(t)
	c.current.set(laptop)
	go func() {
		for {
			in, err := manager.Accept(context.Background())
			if err != nil {
				return
			}
			if in.Datagrams() {
				if _, err := in.AcceptPackets(); err != nil {
					t.Error(err)
				}
				continue
			}
			far, err := in.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			accepted <- far
		}
	}()
	return c, accepted
}

func TestFlowsShowsStreamsOfTheNetstackUntilTheyEnd(t *testing.T) {
	c, accepted := accepting(t)
	stream, err := c.dialer().DialTCP(t.Context(), laptopPort, webService)
	if err != nil {
		t.Fatal(err)
	}
	far := <-accepted
	if _, err := stream.Write(make([]byte, 500)); err != nil {
		t.Fatal(err)
	}
	local := LocalSockets{
		List:     []sockets.Socket{{Proto: packet.ProtoTCP, Local: laptopPort, Remote: webService, Inode: 7, TCP: &sockets.TCP{}}},
		Programs: map[uint32]sockets.Process{7: {PID: 42, Name: "curl"}},
	}
	rows := c.Flows(local)
	if len(rows) != 1 {
		t.Fatalf("%d rows: %+v", len(rows), rows)
	}
	f := rows[0]
	if f.Program != "curl" || f.PID != 42 || f.Protocol != "tcp" || f.Source != laptopPort || f.Destination != webService ||
		!f.Counted || f.Sent != 500 || f.Received != 0 || f.Link == nil || f.Stall != "" || f.Since.IsZero() {
		t.Errorf("%+v", f)
	}
	if _, err := io.WriteString(far, "unread"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if rows := c.Flows(LocalSockets{}); rows[0].Stall != api.StallProgram || rows[0].Program != "" {
			return fmt.Errorf("%+v", rows)
		}
		return nil
	})
	stream.Close()
	if rows := c.Flows(local); len(rows) != 0 {
		t.Errorf("after the end: %+v", rows)
	}
}

func TestFlowsFindsUnconnectedSocketsOfDatagrams(t *testing.T) {
	c, _ := accepting(t)
	dns := netip.MustParseAddrPort("10.96.0.10:53")
	packets, err := c.dialer().DialUDP(t.Context(), laptopPort, dns)
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	if err := packets.WritePacket(make([]byte, 40)); err != nil {
		t.Fatal(err)
	}
	for _, local := range []string{"0.0.0.0:40000", "[::]:40000", "198.19.0.2:40000"} {
		rows := c.Flows(LocalSockets{
			List: []sockets.Socket{{Proto: packet.ProtoUDP, Local: netip.MustParseAddrPort(local),
				Remote: netip.MustParseAddrPort("0.0.0.0:0"), Inode: 8}},
			Programs: map[uint32]sockets.Process{8: {PID: 43, Name: "dig"}},
		})
		if len(rows) != 1 || rows[0].Program != "dig" || rows[0].Protocol != "udp" || rows[0].Sent != 40 {
			t.Errorf("%s: %+v", local, rows)
		}
	}
}

func TestFlowsShowsSocketsInTheSystemNetstack(t *testing.T) {
	c := newTestConnection(t)
	own := laptopPort.Addr()
	socket := func(port uint16, tcp sockets.TCP) sockets.Socket {
		return sockets.Socket{Proto: packet.ProtoTCP, Local: netip.AddrPortFrom(own, port), Remote: webService, TCP: &tcp}
	}
	local := LocalSockets{List: []sockets.Socket{
		socket(1, sockets.TCP{Sent: 10, Received: 20, RTT: time.Millisecond}), socket(2, sockets.TCP{Connecting: true}),
		socket(3, sockets.TCP{Unsent: 5}),
		{Proto: packet.ProtoTCP, Local: netip.MustParseAddrPort("192.0.2.1:4"), Remote: webService, TCP: &sockets.TCP{}},
		{Proto: packet.ProtoUDP, Local: netip.AddrPortFrom(own, 5), Remote: webService},
	}}
	for port := range uint16(2) {
		c.packets.sent.add(flow{packet.ProtoUDP, webService, 5 + port})
	}
	stalls := func(local LocalSockets) (found []string) {
		for _, f := range c.Flows(local) {
			found = append(found, fmt.Sprint(f.Protocol, f.Source.Port(), f.Stall))
		}
		slices.Sort(found)
		return found
	}
	c.packets.steer(func(to *steering) { to.own = []netip.Addr{own} })
	if got := stalls(local); !slices.Equal(got, []string{"tcp2connecting", "udp5"}) { // the others have streams
		t.Errorf("gvisor: %v", got)
	}
	c.packets.steer(func(to *steering) { to.system, to.gateway = true, &api.Gateway{IPv4: true} })
	c.status.change(func(r *report) { r.attached = true })
	if got := stalls(local); !slices.Equal(got, []string{"tcp1", "tcp2connecting", "tcp3destination", "udp5"}) {
		t.Errorf("system: %v", got)
	}
	if got := stalls(LocalSockets{}); !slices.Equal(got, []string{"udp5", "udp6"}) {
		t.Errorf("where the system lists no sockets: %v", got)
	}
	for _, f := range c.Flows(local) {
		if f.Source.Port() == 1 && (f.Seconds != 0.001 || f.RoundTripTo != api.RoundTripDestination || f.Received != 20) {
			t.Errorf("%+v", f)
		}
		if f.Protocol == "udp" && f.Counted {
			t.Errorf("nothing counts %+v", f)
		}
	}
}

func TestNamesOfObjectsAreLookedUpInTheBackground(t *testing.T) {
	n := newObjectNames()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	want := api.ObjectName{Kind: "service", Namespace: "default", Name: "web"}
	asked := make(chan netip.Addr, 10)
	go func() {
		done <- n.run(ctx, func(_ context.Context, a netip.Addr) api.ObjectName {
			asked <- a
			return want
		})
	}()
	testenv.Eventually(t, time.Minute, func() error {
		if got := n.get(webService.Addr()); got != want {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	cancel()
	if err := <-done; err != nil || len(asked) != 1 {
		t.Errorf("%v, asked %d times", err, len(asked))
	}
	for i := range 2 * objectNameQueue { // nobody looks up any more: get does not block
		n.get(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
	}
}

func TestServiceOfAReverseName(t *testing.T) {
	for name, want := range map[string]api.ObjectName{
		"web.default.svc.cluster.local.":            {Kind: "service", Namespace: "default", Name: "web"},
		"10-244-1-7.web.default.svc.cluster.local.": {},
		"web.default.svc.other.local.":              {},
		"\x1b[2J.default.svc.cluster.local.":        {},
		"svc.cluster.local.":                        {},
	} {
		if got := serviceOf(name, "cluster.local"); got != want {
			t.Errorf("%q is %+v, want %+v", name, got, want)
		}
	}
}

func TestPodInIgnoresPodsWithoutAnAddressOfTheirOwn(t *testing.T) {
	pods := make([]corev1.Pod, 3)
	pods[0].Spec.HostNetwork, pods[1].Status.Phase = true, corev1.PodSucceeded
	pods[2].Namespace, pods[2].Name = "default", "web-1"
	if got := podIn(pods); got.Name != "web-1" || got.Kind != "pod" {
		t.Errorf("%+v", got)
	}
	if got := podIn(pods[:2]); got != (api.ObjectName{}) {
		t.Errorf("%+v", got)
	}
}
