package packetlink

import (
	"bytes"
	"context"
	"io"
	"sync/atomic"
	"testing"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
)

// discard is a stream that discards all writes.
type discard struct{ bytes atomic.Uint64 }

func (d *discard) Write(b []byte) (int, error) { d.bytes.Add(uint64(len(b))); return len(b), nil }
func (d *discard) Close() error                { return nil }

// endless is a stream that returns the same frames again and again.
type endless struct {
	data []byte
	at   int
	left int
}

func (e *endless) Read(b []byte) (int, error) {
	if e.left <= 0 {
		return 0, io.EOF
	}
	n := copy(b, e.data[e.at:])
	e.at += n
	if e.at == len(e.data) {
		e.at = 0
	}
	e.left -= n
	return n, nil
}

var benchPackets = []struct {
	name string
	s    spec
}{
	{"64", spec{payload: 24}},
	{"1400", spec{payload: 1360}},
	{"64KiB", spec{payload: 65495, gso: 1400}},
}

func BenchmarkCheck(b *testing.B) {
	data := spec{payload: 65495, gso: 1400}.bytes()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Check(data); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSend includes the copy that reading a TUN device makes.
func BenchmarkSend(b *testing.B) {
	for _, p := range benchPackets {
		for name, gso := range map[string]bool{"whole": true, "split": false} {
			b.Run(p.name+"_"+name, func(b *testing.B) { benchmarkSend(b, p.s, gso) })
		}
	}
}

func benchmarkSend(b *testing.B, p spec, gso bool) {
	stream := new(discard)
	s := NewSender(SenderConfig{GSO: gso, Open: func(context.Context, int) (io.WriteCloser, error) { return stream, nil }})
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() { s.Run(ctx); close(done) }()
	data := p.bytes()
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		s.Send(frame(data))
	}
	b.ReportMetric(float64(s.Stats().Dropped)/float64(b.N), "dropped/op")
	cancel()
	<-done
}

func BenchmarkReceive(b *testing.B) {
	for _, p := range benchPackets {
		b.Run(p.name, func(b *testing.B) {
			data := p.s.bytes()
			one := wire(data)
			stream := &endless{data: bytes.Repeat(one, max(1, 1<<20/len(one))), left: b.N * len(one)}
			var malformed atomic.Uint64
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			b.ResetTimer()
			if err := Receive(stream, 0, new(Barriers), DeliverFunc((*Frame).Release), &malformed); err != nil && err != io.ErrUnexpectedEOF || malformed.Load() > 0 {
				b.Fatal(err, malformed.Load())
			}
		})
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	testenv.WithoutRace(t, "the race detector makes pools forget")
	// Averages are of whole runs of many packets, which a garbage collection that empties the pool does not spoil.
	const packets = 1000
	for _, p := range benchPackets {
		for name, gso := range map[string]bool{"whole": true, "split": false} {
			t.Run(p.name+"_"+name, func(t *testing.T) {
				s := NewSender(SenderConfig{GSO: gso, Limit: 1})
				data := p.s.bytes()
				if n := testing.AllocsPerRun(5, func() {
					for range packets {
						s.Send(frame(data)) // dropped, after all work but the last copy
					}
				}); n > packets/20 {
					t.Errorf("Send: %v allocations for %d packets", n, packets)
				}
			})
		}
		t.Run(p.name+"_receive", func(t *testing.T) {
			var malformed atomic.Uint64
			one := wire(p.s.bytes())
			all := bytes.Repeat(one, packets)
			if n := testing.AllocsPerRun(5, func() {
				if err := Receive(bytes.NewReader(all), 0, new(Barriers), DeliverFunc((*Frame).Release), &malformed); err != nil {
					t.Error(err)
				}
			}); n > packets/20 {
				t.Errorf("Receive: %v allocations for %d packets", n, packets)
			}
		})
	}
	var l list
	super := frame(spec{payload: 65495, gso: 1400}.bytes())
	defer super.Release()
	if n := testing.AllocsPerRun(100, func() {
		h, err := Check(super.Bytes())
		if err != nil || h.Proto != packet.ProtoTCP {
			t.Error(err)
		}
		l.join(listOf(frame(super.Bytes()[:1000]), 1), 0)
		l.release()
	}); n >= 1 {
		t.Errorf("Check and join: %v allocations", n)
	}
}
