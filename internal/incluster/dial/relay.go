package dial

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"syscall"
)

// stream is a laptop's end of a TCP flow (transport.Stream). Its WriteTo holds no buffer while it waits.
type stream interface {
	io.Writer
	io.WriterTo
	CloseWrite() error
	Reset() error
	Close() error
}

// relay copies bytes between a laptop and a pod until both directions have ended, and closes both. It forwards a
// half-close, and the other direction continues without a limit:
//
//	laptop FIN ─▶ shutdown(SHUT_WR) to the pod        pod FIN ─▶ CloseWrite to the laptop
//	laptop RST ─▶ RST to the pod                      pod RST ─▶ Reset to the laptop
//
// There is no idle timeout. The caller closes gone when the laptop resets its end, and lost when the session ends.
// relay uses two goroutines, and no buffers while idle.
func relay(laptop stream, pod *net.TCPConn, gone, lost <-chan struct{}, b *buffers) {
	var ended atomic.Int32  // directions that ended well
	var finSent atomic.Bool // to the pod
	abort := func() {
		laptop.Reset()
		pod.SetLinger(0) // so that Close sends RST
		pod.Close()
	}
	down := make(chan struct{})
	go func() {
		defer close(down)
		err := readSocket(pod, b, true, func(p []byte) error {
			_, err := laptop.Write(p)
			return err
		})
		// isClosed comes first: a connection that ends well, with our FIN, is closed only after finSent is set.
		if err == io.EOF && isClosed(pod) && !finSent.Load() {
			err = syscall.ECONNRESET // the kernel reported it to the other goroutine
		}
		if err == io.EOF && laptop.CloseWrite() == nil {
			if ended.Add(1) == 2 || errors.Is(awaitReset(pod), net.ErrClosed) {
				return
			}
		}
		abort()
	}()
	_, err := laptop.WriteTo(&podWriter{pod, gone, lost, abort})
	if err == nil {
		finSent.Store(true)
		err = pod.CloseWrite()
	}
	if err != nil {
		abort()
	} else if ended.Add(1) == 2 {
		pod.Close() // the other goroutine waits for a reset
	}
	select {
	case <-down:
	case <-gone: // nothing more can be read from the laptop, but it may reset
		abort()
	case <-lost:
		abort()
	}
	<-down
	pod.Close()
	laptop.Close()
}

// podWriter writes to a pod. While the pod does not read and Write blocks, nothing reads from the laptop either, so
// Write watches for the laptop's reset.
type podWriter struct {
	pod        *net.TCPConn
	gone, lost <-chan struct{}
	abort      func()
}

func (w *podWriter) Write(p []byte) (int, error) {
	var written chan struct{}
	n, err := writeAll(w.pod, p, func() {
		written = make(chan struct{})
		go func() {
			select {
			case <-w.gone:
				w.abort()
			case <-w.lost:
				w.abort()
			case <-written:
			}
		}()
	})
	if written != nil {
		close(written)
	}
	return n, err
}
