package manager

import (
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"kubevpn/pkg/wire/transport"
)

// packets is a laptop's end of a flow of datagrams (transport.Packets).
type packets interface {
	Wait() error // until ReadPacket does not block
	ReadPacket([]byte) (int, error)
	WritePacket([]byte) error
	CloseWithCode(transport.Code) error
}

// datagrams is the cluster's end of a flow of datagrams.
type datagrams interface {
	send([]byte) error
	// receive calls use with each datagram, until close or an error. use must not keep the datagram.
	receive(b *buffers, use func([]byte) error) error
	close() // not concurrently with send
}

// exchange carries datagrams until the laptop ends the flow, the other end fails, or nobody uses the flow for idle. It
// closes both ends.
func exchange(laptop packets, d datagrams, idle time.Duration, b *buffers) {
	var timer idleTimer
	timer.start(idle, func() { laptop.CloseWithCode(transport.CodeOK) })
	received := make(chan struct{})
	go func() {
		defer close(received)
		laptop.CloseWithCode(endCode(d.receive(b, func(p []byte) error {
			timer.touch()
			return laptop.WritePacket(p)
		})))
	}()
	laptop.CloseWithCode(endCode(sendAll(laptop, d, &timer, b)))
	timer.timer.Stop()
	d.close()
	<-received
}

// sendAll carries datagrams from the laptop. It returns nil when the laptop ends the flow.
func sendAll(laptop packets, d datagrams, timer *idleTimer, b *buffers) error {
	for laptop.Wait() == nil {
		buf := b.take()
		n, err := laptop.ReadPacket(buf.data)
		if err == nil {
			timer.touch()
			err = d.send(buf.data[:n])
		} else {
			err = nil // Wait returns it
		}
		b.give(buf)
		if err != nil && !isLoss(err) {
			return err
		}
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
