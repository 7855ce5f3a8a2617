package manager

import "sync"

// bufferSize is what one read from a socket may take: more than any datagram.
const bufferSize = 64 << 10

// buffers lends buffers to flows that have something to read. An idle flow has none: with ten thousand of them
// that is the difference between 100 MB and 1 GB.
type buffers struct{ pool sync.Pool }

func (b *buffers) take() *[bufferSize]byte {
	if p, ok := b.pool.Get().(*[bufferSize]byte); ok {
		return p
	}
	return new([bufferSize]byte)
}

func (b *buffers) give(p *[bufferSize]byte) { b.pool.Put(p) }
