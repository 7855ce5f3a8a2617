package tun

import (
	"bytes"
	"slices"
	"testing"

	"kubevpn/pkg/datapath/packet"
)

func TestUnitOf(t *testing.T) {
	for name, want := range map[string]uint32{"utun": 0, "utun0": 1, "utun7": 8, "utun65535": 65536} {
		if got, err := unitOf(name); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", name, got, err, want)
		}
	}
	for _, name := range []string{"", "tun0", "utun-1", "utun65536", "utunx", "kubevpn0"} {
		if got, err := unitOf(name); err == nil {
			t.Errorf("%q: %d, want an error", name, got)
		}
	}
}

func TestFrameReplacesTheHeader(t *testing.T) {
	header := bytes.Repeat([]byte{9}, packet.VirtioLen)
	var f frame
	for name, tt := range map[string]struct {
		packet []byte
		family byte
	}{
		"ipv4":  {[]byte{0x45, 1, 2, 3, 4, 5}, family4},
		"ipv6":  {[]byte{0x60, 1, 2, 3, 4, 5}, family6},
		"empty": {nil, family4},
	} {
		whole := slices.Concat(header, tt.packet)
		want := slices.Concat([]byte{0, 0, 0, tt.family}, tt.packet)
		for cut := range len(whole) + 1 {
			f.set([][]byte{whole[:cut], {}, whole[cut:]})
			if got := slices.Concat(f.pieces...); !bytes.Equal(got, want) {
				t.Errorf("%s in pieces of %d and %d bytes: % x, want % x", name, cut, len(whole)-cut, got, want)
			}
		}
	}
}

func BenchmarkFrame(b *testing.B) {
	b.ReportAllocs()
	pieces := [][]byte{make([]byte, packet.VirtioLen), make([]byte, 40), make([]byte, 1400)}
	var f frame
	for b.Loop() {
		f.set(pieces)
	}
}
