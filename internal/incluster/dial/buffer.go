package dial

import (
	"sync"

	"kubevpn/pkg/wire/transport"
)

const (
	// bufferSize is the size of one read from a socket in bytes. It is larger than any datagram.
	bufferSize = 64 << 10
	// smallBufferSize is the size when the session has used up its part of the budget. Larger datagrams are then lost.
	smallBufferSize = 4 << 10
)

// buffers lends buffers to those flows of a session that have data to read. Idle flows hold no buffer: for ten thousand
// flows this saves about 900 MB. A flow whose laptop does not read keeps its buffer, so buffers count against the
// session's budget.
type buffers struct {
	session      *transport.Session // nil: unbounded, for tests
	large, small sync.Pool
}

type buffer struct {
	data  []byte
	sizes [maxBatch]int // of the datagrams in data
}

func (b *buffers) take() *buffer {
	pool, size := &b.large, bufferSize
	if b.session != nil && !b.session.Hold(bufferSize) {
		pool, size = &b.small, smallBufferSize
	}
	if p, ok := pool.Get().(*buffer); ok {
		return p
	}
	return &buffer{data: make([]byte, size)}
}

func (b *buffers) give(p *buffer) {
	if len(p.data) == smallBufferSize {
		b.small.Put(p)
		return
	}
	b.large.Put(p)
	if b.session != nil {
		b.session.Release(bufferSize)
	}
}
