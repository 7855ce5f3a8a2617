package tun_test

import (
	"bytes"
	"net/netip"
	"testing"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
)

var (
	laptop  = netip.MustParseAddr("198.19.4.9")
	pod     = netip.MustParseAddr("10.0.3.4")
	mapped  = netip.MustParseAddr("198.18.0.4")
	mapping = packet.Mappings{{Cluster: netip.MustParsePrefix("10.0.3.0/24"), Local: netip.MustParsePrefix("198.18.0.0/24")}}
)

// datagram returns a virtio-net header and a UDP datagram.
func datagram(src, dst netip.Addr, payload []byte) []byte {
	out := packet.Outgoing{Src: src, Dst: dst, Proto: packet.ProtoUDP, PayloadLen: 8 + len(payload)}
	h := packet.UDP(netip.AddrPortFrom(src, 1000), netip.AddrPortFrom(dst, 1000), payload, false)
	return append(append(out.Append(make([]byte, packet.VirtioLen)), h[:]...), payload...)
}

// What reads and writes a mapped device knows the cluster's addresses only, and the kernel the mapped ones.
func TestMappedTranslatesPackets(t *testing.T) {
	inner, kernel := tuntest.Pair(1500, false)
	d := &tun.Mapped{Device: inner}
	defer d.Close()
	payload := bytes.Repeat([]byte("payload "), 150)
	buf := make([]byte, tun.MinRead)
	read := func(from tun.Device) []byte {
		n, err := from.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return buf[:n]
	}
	for _, step := range []struct {
		mappings packet.Mappings
		here     netip.Addr
	}{{nil, pod}, {mapping, mapped}, {nil, pod}} {
		d.Map(step.mappings)
		if err := kernel.Writev([][]byte{datagram(laptop, step.here, payload)}); err != nil {
			t.Fatal(err)
		}
		if got := read(d); !bytes.Equal(got, datagram(laptop, pod, payload)) {
			t.Errorf("mapped by %v, a packet for %v arrives as % x", step.mappings, step.here, got[:48])
		}
		answer := datagram(pod, laptop, payload)
		for _, cut := range []int{packet.VirtioLen, packet.VirtioLen + 20, packet.VirtioLen + 25, 300} {
			pieces := [][]byte{bytes.Clone(answer[:cut]), {}, bytes.Clone(answer[cut:])}
			if err := d.Writev(pieces); err != nil {
				t.Fatal(err)
			}
			if got := read(kernel); !bytes.Equal(got, datagram(step.here, laptop, payload)) {
				t.Errorf("mapped by %v, in pieces of %d bytes: % x", step.mappings, cut, got[:48])
			}
			if !bytes.Equal(bytes.Join(pieces, nil), answer) {
				t.Error("the pieces, which belong to others, have changed")
			}
		}
	}
}

func BenchmarkMappedWritev(b *testing.B) {
	for name, mappings := range map[string]packet.Mappings{"none": nil, "mapped": mapping} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			d := &tun.Mapped{Device: nowhere{}}
			d.Map(mappings)
			p := datagram(pod, laptop, make([]byte, 1400))
			pieces := [][]byte{p[:packet.VirtioLen], p[packet.VirtioLen:50], p[50:]}
			for b.Loop() {
				if err := d.Writev(pieces); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// nowhere is a device that drops packets.
type nowhere struct{ tun.Device }

func (nowhere) Writev([][]byte) error { return nil }
