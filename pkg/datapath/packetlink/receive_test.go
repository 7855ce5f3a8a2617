package packetlink

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"kubevpn/pkg/datapath/packet"
)

// pieces is a stream on which bytes arrive in pieces of the given lengths, again and again; 0 is a Read of nothing.
type pieces struct {
	data    []byte
	lengths []int
	i       int
	err     error // at the end; nil: io.EOF
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.data) == 0 {
		if p.err != nil {
			return 0, p.err
		}
		return 0, io.EOF
	}
	n := min(p.lengths[p.i%len(p.lengths)], len(p.data), len(b))
	p.i++
	copy(b, p.data[:n])
	p.data = p.data[n:]
	return n, nil
}

// waitingPieces are pieces with a method Wait.
type waitingPieces struct{ pieces }

func (p *waitingPieces) Wait() error {
	if len(p.data) == 0 {
		return io.EOF
	}
	return nil
}

func receiveAll(stream io.Reader) (got [][]byte, malformed uint64, err error) {
	var count atomic.Uint64
	err = Receive(stream, 0, new(Barriers), DeliverFunc(func(f *Frame) {
		if h, err := f.Header(); err != nil || h.Len != len(f.Packet()) {
			panic("a frame without a header was delivered")
		}
		got = append(got, bytes.Clone(f.Bytes()))
		f.Release()
	}), &count)
	return got, count.Load(), err
}

func TestReceiveParsesFramesInAnyPieces(t *testing.T) {
	small := spec{payload: 1}.bytes()
	packet1500 := spec{v6: true, payload: 1400}.bytes()
	middle := spec{payload: largeFrame - 50, gso: 1400}.bytes()
	large := spec{payload: 40000, gso: 1400}.bytes()
	longest := spec{payload: 65535 - 40, gso: 1400}.bytes()
	sequences := map[string][][]byte{
		"small":        {small},
		"many_small":   slicesRepeat(small, 3000),
		"many_longest": slicesRepeat(longest, 5),
		"mixed":        {small, longest, small, small, large, middle, packet1500, longest, longest, small, large, packet1500, packet1500, small},
		"large_first":  {large, small},
		"small_first":  {small, large},
		"nothing":      {},
	}
	lengths := map[string][]int{
		"whole": {1 << 20}, "bytes": {1}, "3": {3}, "4": {4}, "odd": {1, 0, 5, 77, 1499, 0, 0, 4097, 65535}, "64KiB": {64 << 10},
	}
	for name, want := range sequences {
		for piece, l := range lengths {
			t.Run(name+"_in_"+piece, func(t *testing.T) {
				for _, stream := range []io.Reader{
					&pieces{data: wire(want...), lengths: l},
					&waitingPieces{pieces{data: wire(want...), lengths: l}},
				} {
					got, malformed, err := receiveAll(stream)
					if err != nil || malformed != 0 || len(got) != len(want) {
						t.Fatalf("%d frames of %d, %d malformed, %v", len(got), len(want), malformed, err)
					}
					for i := range want {
						if !bytes.Equal(got[i], want[i]) {
							t.Fatalf("frame %d differs", i)
						}
					}
				}
			})
		}
	}
}

func slicesRepeat(b []byte, n int) (all [][]byte) {
	for range n {
		all = append(all, b)
	}
	return all
}

func TestReceiveReportsHowTheStreamEnded(t *testing.T) {
	good := spec{payload: 20}.bytes()
	large := spec{payload: 40000, gso: 1400}.bytes()
	bad := bytes.Clone(good)
	bad[packet.VirtioLen] = 0x15
	broken := errors.New("broken")
	cat := func(bs ...[]byte) []byte { return bytes.Join(bs, nil) }
	tests := []struct {
		name      string
		data      []byte
		streamErr error
		frames    int
		malformed uint64
		err       error
	}{
		{"clean", wire(good, good), nil, 2, 0, nil},
		{"stream_error", wire(good), broken, 1, 0, broken},
		{"in_the_length", cat(wire(good), []byte{0, 0}), nil, 1, 0, io.ErrUnexpectedEOF},
		{"behind_the_length", cat(wire(good), []byte{0, 0, 0, 60}), nil, 1, 0, io.ErrUnexpectedEOF},
		{"in_a_small_frame", cat(wire(good), wire(good)[:30]), nil, 1, 0, io.ErrUnexpectedEOF},
		{"in_a_large_frame", cat(wire(large), wire(large)[:30000]), nil, 1, 0, io.ErrUnexpectedEOF},
		{"stream_error_in_a_frame", wire(large)[:30000], broken, 0, 0, broken},
		{"length_0", cat(wire(good), []byte{0, 0, 0, 0}, wire(good)), nil, 1, 0, ErrFrame},
		{"length_without_packet", cat(wire(good), []byte{0, 0, 0, 10}, wire(good)), nil, 1, 0, ErrFrame},
		{"length_too_long", cat(wire(good), []byte{0, 1, 0, 10}, wire(good)), nil, 1, 0, ErrFrame},
		{"length_negative", cat(wire(large), []byte{0xff, 0xff, 0xff, 0xff}, wire(good)), nil, 1, 0, ErrFrame},
		{"malformed_between", wire(good, bad, good, large), nil, 3, 1, nil},
		{"shortest_frame", wire(make([]byte, minFrame)), nil, 0, 1, nil},
		{"longest_frame", wire(make([]byte, maxFrame), good), nil, 1, 1, nil},
	}
	for _, tt := range tests {
		for _, l := range [][]int{{1 << 20}, {1}, {9, 100, 1000}} {
			t.Run(tt.name, func(t *testing.T) {
				got, malformed, err := receiveAll(&pieces{data: tt.data, lengths: l, err: tt.streamErr})
				if len(got) != tt.frames || malformed != tt.malformed || !errors.Is(err, tt.err) {
					t.Errorf("%d frames, %d malformed, %v; want %d, %d, %v", len(got), malformed, err, tt.frames, tt.malformed, tt.err)
				}
			})
		}
	}
}

func FuzzReceive(f *testing.F) {
	f.Add(wire(spec{payload: 1}.bytes(), spec{payload: 40000, gso: 1400}.bytes(), spec{proto: 17, payload: 9, partial: true}.bytes()), uint64(1))
	f.Add([]byte{0, 1, 0, 9}, uint64(2))
	f.Add(wire(newBarrier(barrierPassed, 1).Bytes(), spec{payload: 1}.bytes(), newBarrier(barrierAwaited, 1).Bytes()), uint64(3))
	f.Fuzz(func(t *testing.T, data []byte, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		lengths := make([]int, 8)
		for i := range lengths {
			lengths[i] = 1 + r.IntN(1<<r.IntN(17))
		}
		got, malformed, err := receiveAll(&pieces{data: bytes.Clone(data), lengths: lengths})
		all, allMalformed, allErr := receiveAll(&pieces{data: bytes.Clone(data), lengths: []int{1 << 20}})
		if len(got) != len(all) || malformed != allMalformed || (err == nil) != (allErr == nil) {
			t.Fatalf("in pieces %d frames, %d malformed, %v; whole %d, %d, %v", len(got), malformed, err, len(all), allMalformed, allErr)
		}
		size := 0
		for i := range got {
			if !bytes.Equal(got[i], all[i]) {
				t.Fatalf("frame %d depends on the pieces in which it arrives", i)
			}
			if _, err := Check(got[i]); err != nil {
				t.Fatalf("a malformed frame was delivered: %v", err)
			}
			size += prefixLen + len(got[i])
		}
		if err == nil && malformed == 0 && (len(data)-size)%(prefixLen+barrierLen) != 0 {
			t.Fatalf("%d bytes of %d became frames, and the others are not barriers", size, len(data))
		}
	})
}
