package dial

import (
	"errors"
	"iter"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/transport"
)

// packets is a laptop's end of a flow of datagrams (transport.Packets).
type packets interface {
	Wait() error // until ReadPackets does not block
	ReadPackets(b []byte, sizes []int) (int, error)
	WritePacket([]byte) error
	TryWritePackets(b []byte, size int) (int, error)
	CloseWithCode(transport.Code) error
}

// datagrams is the cluster's end of a flow of datagrams. It passes on several datagrams at once, one behind the other,
// each of which has size bytes, except that the last may be shorter.
type datagrams interface {
	send(p []byte, size int) error
	// receive calls use with datagrams, until close or an error. use must not keep them.
	receive(b *buffers, use func(p []byte, size int) error) error
	close() // not concurrently with send
}

// each iterates over the datagrams in p, of which there is at least one.
func each(p []byte, size int) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for {
			n := min(size, len(p))
			if !yield(p[:n]) || n == len(p) {
				return
			}
			p = p[n:]
		}
	}
}

// exchange carries datagrams until the laptop ends the flow, the other end fails, or nobody uses the flow for idle. It
// closes both ends.
func exchange(laptop packets, d datagrams, idle time.Duration, b *buffers) {
	var timer idleTimer
	timer.start(idle, func() { laptop.CloseWithCode(transport.CodeOK) })
	received := make(chan struct{})
	go func() {
		defer close(received)
		q := backlog{laptop: laptop, buffers: b}
		err := d.receive(b, func(p []byte, size int) error {
			timer.touch()
			return q.put(p, size)
		})
		q.drained.Wait()
		laptop.CloseWithCode(endCode(err))
	}()
	laptop.CloseWithCode(endCode(sendAll(laptop, d, &timer, b)))
	timer.timer.Stop()
	d.close()
	<-received
}

// maxBatch is the number of datagrams that sendAll reads at once.
const maxBatch = 64

// sendAll carries datagrams from the laptop. It returns nil when the laptop ends the flow.
func sendAll(laptop packets, d datagrams, timer *idleTimer, b *buffers) error {
	for laptop.Wait() == nil {
		buf := b.take()
		n, err := laptop.ReadPackets(buf.data, buf.sizes[:])
		if err == nil { // otherwise Wait returns it
			timer.touch()
			err = sendBatch(d, buf.data, buf.sizes[:n])
		} else {
			err = nil
		}
		b.give(buf)
		if err != nil {
			return err
		}
	}
	return nil
}

// sendBatch sends the datagrams in p, which have these sizes.
func sendBatch(d datagrams, p []byte, sizes []int) error {
	for len(sizes) > 0 {
		n, sum := packet.Train(sizes, transport.MaxPacket)
		if err := d.send(p[:sum], sizes[0]); err != nil && !isLoss(err) {
			return err
		}
		p, sizes = p[sum:], sizes[n:]
	}
	return nil
}

// isLoss reports whether err concerns one datagram: it was too large, or the network was too busy. The flow goes on.
func isLoss(err error) bool {
	return errors.Is(err, syscall.EMSGSIZE) || errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ENOMEM)
}

// endCode returns the code that tells the laptop why a flow of datagrams has ended.
func endCode(err error) transport.Code {
	if errors.Is(err, net.ErrClosed) { // the manager closed it
		return transport.CodeOK
	}
	return transport.CodeOf(err)
}

// idleTimer ends a flow of datagrams that nobody uses: nothing else shows that one has ended.
type idleTimer struct {
	used  atomic.Int64 // nanoseconds since began
	began time.Time
	timer *time.Timer
}

func (t *idleTimer) start(idle time.Duration, end func()) {
	t.began = time.Now()
	t.timer = time.AfterFunc(idle, func() {
		if left := idle - (time.Since(t.began) - time.Duration(t.used.Load())); left > 0 {
			t.timer.Reset(left)
			return
		}
		end()
	})
}

func (t *idleTimer) touch() { t.used.Store(int64(time.Since(t.began))) }
