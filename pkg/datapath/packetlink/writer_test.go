package packetlink

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"kubevpn/pkg/datapath/packet"
)

// writes is a Device that records the length of each write.
type writes struct {
	uso     bool
	err     error
	lengths []int
}

func (d *writes) USO() bool { return d.uso }
func (d *writes) Writev(pieces [][]byte) error {
	n := 0
	for _, p := range pieces {
		n += len(p)
	}
	d.lengths = append(d.lengths, n-packet.VirtioLen)
	return d.err
}

func inspected(t testing.TB, b []byte) *Frame {
	t.Helper()
	f := frame(b)
	if _, err := f.Header(); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestWriterJoinsOnlyDatagramsOfOneFlow(t *testing.T) {
	udp := spec{proto: packet.ProtoUDP, partial: true, sport: 1, dport: 2, payload: 1000}
	with := func(s spec, edit func(*spec)) spec { edit(&s); return s }
	bytesOf := func(s spec, edit func(b []byte)) []byte {
		b := s.bytes()
		edit(b)
		return b
	}
	a := udp.bytes()
	tests := []struct {
		name   string
		frames [][]byte
		want   []int
	}{
		{"equal", [][]byte{a, a, a}, []int{3028}},
		{"last_is_shorter", [][]byte{a, a, with(udp, func(s *spec) { s.payload = 10 }).bytes(), a}, []int{2038, 1028}},
		{"longer", [][]byte{a, with(udp, func(s *spec) { s.payload = 1001 }).bytes()}, []int{1028, 1029}},
		{"empty", [][]byte{a, with(udp, func(s *spec) { s.payload = 0 }).bytes(), a}, []int{1028, 28, 1028}},
		{"other_port", [][]byte{a, with(udp, func(s *spec) { s.sport = 3 }).bytes()}, []int{1028, 1028}},
		{"other_lifetime", [][]byte{a, with(udp, func(s *spec) { s.ttl = 9 }).bytes()}, []int{1028, 1028}},
		{"other_version", [][]byte{a, with(udp, func(s *spec) { s.v6 = true }).bytes()}, []int{1028, 1048}},
		{"version_6", slices.Repeat([][]byte{with(udp, func(s *spec) { s.v6 = true }).bytes()}, 2), []int{2048}},
		{"tcp", slices.Repeat([][]byte{spec{payload: 100, partial: true}.bytes()}, 2), []int{140, 140}},
		{"unverified", slices.Repeat([][]byte{with(udp, func(s *spec) { s.partial = false }).bytes()}, 2), []int{1028, 1028}},
		{"verified", slices.Repeat([][]byte{bytesOf(with(udp, func(s *spec) { s.partial = false }), func(b []byte) {
			b[0] = packet.VirtioDataValid
		})}, 2), []int{2028}},
		{"wrong_length", slices.Repeat([][]byte{bytesOf(udp, func(b []byte) { b[packet.VirtioLen+25]-- })}, 2), []int{1028, 1028}},
		{"most_bytes", slices.Repeat([][]byte{with(udp, func(s *spec) { s.payload = 1200 }).bytes()}, 55), []int{64828, 1228}},
		{"most_segments", slices.Repeat([][]byte{with(udp, func(s *spec) { s.payload = 1 }).bytes()}, 66), []int{92, 30}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var failed atomic.Uint64
			w, d := NewWriter(&failed), &writes{uso: true}
			for _, b := range tt.frames {
				w.Write(d, inspected(t, b))
			}
			w.Flush()
			w.Flush()
			if !slices.Equal(d.lengths, tt.want) {
				t.Errorf("packets of %v bytes, want %v", d.lengths, tt.want)
			}
		})
	}
}

func TestWriterKeepsNothingForDevicesWithoutOffload(t *testing.T) {
	a := spec{proto: packet.ProtoUDP, partial: true, payload: 1000}.bytes()
	var failed atomic.Uint64
	w, plain, joining := NewWriter(&failed), &writes{err: errors.New("full")}, &writes{uso: true}
	w.Write(joining, inspected(t, a))
	w.Write(plain, inspected(t, a))
	w.Write(plain, inspected(t, a))
	if len(plain.lengths) != 2 || len(joining.lengths) != 1 || failed.Load() != 2 {
		t.Errorf("%d and %d packets were written, and %d failed", len(plain.lengths), len(joining.lengths), failed.Load())
	}
}

func BenchmarkWriter(b *testing.B) {
	p := spec{proto: packet.ProtoUDP, partial: true, payload: 1200}.bytes()
	var failed atomic.Uint64
	w, d := NewWriter(&failed), &writes{uso: true}
	b.SetBytes(int64(len(p)))
	b.ReportAllocs()
	for b.Loop() {
		d.lengths = d.lengths[:0]
		w.Write(d, inspected(b, p))
	}
}
