package manager

import (
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/transport"
)

// The filter applies to packets too: the manager's own pod is prohibited.
func TestPacketsPassTheFilter(t *testing.T) {
	r := start(t, Config{PodIPs: managertest.Addrs("10.244.1.9")})
	lease := managertest.Hello(t, r.laptop, helloV1).Next().Hello.Lease
	st, err := r.laptop.Open(t.Context(), transport.Request{Proto: transport.ProtoIP, Src: netip.AddrPortFrom(lease.Addrs[0], 0)})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Reset()
	st.SetDeadline(time.Now().Add(managertest.Timeout))
	out := packet.Outgoing{Src: lease.Addrs[0], Dst: netip.MustParseAddr("10.244.1.9"), Proto: packet.ProtoUDP, PayloadLen: 8}
	udp := packet.UDP(netip.AddrPortFrom(out.Src, 4000), netip.AddrPortFrom(out.Dst, 80), nil, false)
	frame := append(out.Append(make([]byte, 4+packet.VirtioLen)), udp[:]...)
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
	if _, err := st.Write(frame); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 4+packet.VirtioLen+packet.IPv4HeaderLen+8)
	if _, err := io.ReadFull(st, answer); err != nil {
		t.Fatal(err)
	}
	if icmp := answer[4+packet.VirtioLen+packet.IPv4HeaderLen:]; icmp[0] != 3 || icmp[1] != 13 {
		t.Errorf("the answer is ICMP type %d, code %d", icmp[0], icmp[1])
	}
}

func TestFilterIsApplied(t *testing.T) {
	r := start(t, Config{}, func(m *Manager) { m.dialer.Check = m.filter.Check })
	managertest.Hello(t, r.laptop, helloV1).Next()
	r.vip("127.0.0.1:10800")
	for _, dst := range []string{"127.0.0.1:10800", "169.254.169.254:80", "10.96.0.1:80"} {
		if _, err := r.open(t, dst); !errors.Is(err, syscall.EACCES) {
			t.Errorf("%s: got %v", dst, err)
		}
	}
}
