package packetlink

import (
	"encoding/binary"
	"math/bits"
	"time"

	"kubevpn/pkg/datapath/packet"
)

const (
	// A flow becomes bulk when its count exceeds bulkBytes, and sparse again when its count falls below sparseBytes.
	// The count halves every halfLife, so a flow of less than about 400 KB/s stays sparse.
	bulkBytes   = 64 << 10
	sparseBytes = 16 << 10
	halfLife    = 100 * time.Millisecond
	// maxCount bounds the count, so that any flow becomes sparse after half a second of silence.
	maxCount = 512 << 10
)

const (
	flowSets = 256 // a power of two
	flowWays = 4
)

// flow is the state of one flow, or of the few flows with the same hash.
type flow struct {
	hash  uint64
	since time.Duration // when count last halved
	count int
	bulk  bool
	// last is the position in its stream's queue behind the flow's last frame.
	last uint64
}

// decay halves the count for the time that has passed.
func (f *flow) decay(now time.Duration) {
	if n := (now - f.since) / halfLife; n > 0 {
		f.count >>= min(n, 63)
		f.since += n * halfLife
	}
}

// flows is a set-associative table of recent flows. A flow that is not in it counts as new.
type flows struct {
	seed uint64
	sets [flowSets][flowWays]flow
}

// find returns the entry for a hash. If there is none it replaces the entry of the set that counts least.
func (t *flows) find(hash uint64, now time.Duration) *flow {
	set := &t.sets[hash%flowSets]
	least := &set[0]
	for i := range set {
		f := &set[i]
		if f.hash == hash {
			f.decay(now)
			return f
		}
		f.decay(now)
		if f.count < least.count {
			least = f
		}
	}
	*least = flow{hash: hash, since: now}
	return least
}

// hash hashes the addresses, the protocol and, except for fragments, the ports. ok is false unless the protocol is TCP
// or UDP.
func (t *flows) hash(h *packet.Header, p []byte) (hash uint64, ok bool) {
	if h.Proto != packet.ProtoTCP && h.Proto != packet.ProtoUDP {
		return 0, false
	}
	hash = mix(t.seed, uint64(h.Proto))
	addresses := p[12:20]
	if h.Version == 6 {
		addresses = p[8:40]
	}
	for ; len(addresses) >= 8; addresses = addresses[8:] {
		hash = mix(hash, binary.BigEndian.Uint64(addresses))
	}
	if !h.IsFragment() && len(p) >= h.HeaderLen+4 {
		hash = mix(hash, uint64(binary.BigEndian.Uint32(p[h.HeaderLen:])))
	}
	return hash, true
}

// isAck reports whether p is a bare acknowledgement of TCP (RFC 9293, section 3.1): no payload, and no flag but ACK.
func isAck(h *packet.Header, p []byte) bool {
	if h.Proto != packet.ProtoTCP || h.IsFragment() || h.Len < h.HeaderLen+20 {
		return false
	}
	tcp := p[h.HeaderLen:h.Len]
	return tcp[13] == 0x10 && len(tcp) == int(tcp[12]>>4)*4
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^b^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	return hi ^ lo
}
