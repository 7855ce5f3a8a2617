package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// doorstepTime is for how long an agent's greeting is to be had from a port. By then the owner has it from there, or from
	// the container's log.
	doorstepTime = time.Minute
	// doorstepPatience is for who connects and does not read. A greeting fits into the socket's buffer.
	doorstepPatience = time.Second
)

// doorstep is api.AgentGreetVariable's port: the latest greeting for whoever connects from within the pod's network. Who asks
// before there is one waits in the kernel's queue. It tells nothing that is secret, and takes no word: the greeting is what
// the log has, which the kubelet gives later. A nil doorstep is none.
//
// The laptop that reads it through the kubelet's port-forward knows that somebody of this pod answers, not that it is this
// container. Another container of the pod that took the port first, and answered with a key of its own, would get the
// laptop's claim, and could open streams to the ports of the laptop that it names: what reaches the pod would get there
// as well, and what reaches the pod is for the pod's containers anyway. It would neither learn the laptop's key, which never leaves it, nor
// be able to give orders to this agent. What it must not get, the application's TLS key, is only given to whom the log names.
type doorstep struct {
	listener net.Listener
	log      *slog.Logger

	mu    sync.Mutex
	line  []byte
	known chan struct{} // closed when there is a line
}

// openDoorstep serves on the port until close, for a while. A port that somebody else has is no error: the log is there.
func openDoorstep(port uint16, log *slog.Logger) (d *doorstep, closed func()) {
	if port == 0 {
		return nil, func() {}
	}
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		log.Warn("the owner's laptop has to wait for this log", "err", err)
		return nil, func() {}
	}
	d = &doorstep{listener: l, log: log, known: make(chan struct{})}
	ctx, cancel := context.WithTimeout(context.Background(), doorstepTime)
	context.AfterFunc(ctx, d.close)
	var serving sync.WaitGroup
	serving.Go(func() { d.serve(ctx) })
	return d, func() {
		cancel()
		d.close()
		serving.Wait()
	}
}

func (d *doorstep) serve(ctx context.Context) {
	select {
	case <-d.known:
	case <-ctx.Done():
		return
	}
	for {
		conn, err := d.listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				d.log.Warn("greeting on a port", "err", err)
			}
			return
		}
		d.mu.Lock()
		line := d.line
		d.mu.Unlock()
		err = conn.SetWriteDeadline(time.Now().Add(doorstepPatience))
		if err == nil {
			_, err = conn.Write(line)
		}
		if err = errors.Join(err, conn.Close()); err != nil {
			d.log.Debug("greeting on a port", "err", err)
		}
	}
}

// say makes line the greeting.
func (d *doorstep) say(line []byte) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.line == nil {
		close(d.known)
	}
	d.line = line
}

// close lets the port go.
func (d *doorstep) close() {
	if d != nil {
		d.listener.Close() // again and again
	}
}
