package lab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Line is a link between a laptop and a distant cluster. Both directions have the same properties.
type Line struct {
	RTT   time.Duration // there and back, without a queue
	Rate  float64       // bits a second; 0: no limit
	Loss  float64       // the part of the packets that is lost, 0 to 1
	Burst float64       // mean number of packets that are lost one after the other (Gilbert 1960); 0: each by itself
	Queue time.Duration // maximum time of a packet in the queue; 0: LineQueue
}

// String returns "60ms, 100 Mb/s, 0.1 % loss", without unlimited values.
func (line Line) String() string {
	s := line.RTT.String()
	if line.Rate > 0 {
		s += fmt.Sprintf(", %g Mb/s", line.Rate/1e6)
	}
	if line.Loss > 0 {
		s += fmt.Sprintf(", %g %% loss", 100*line.Loss)
	}
	if line.Burst > 0 {
		s += fmt.Sprintf(" in bursts of %g", line.Burst)
	}
	return s
}

const (
	// LineQueue is the default of Line.Queue.
	LineQueue = 50 * time.Millisecond

	lineLink = "line0" // both ends
	lineMTU  = 1500
	etherLen = 14 // the overhead of each packet on the line
)

// Stretch moves the laptop's default route to a line, until stop is called or the program ends. It needs no netem,
// which some kernels lack. The line is a pair of TUN devices, and this program carries the packets between them:
//
//	laptop ── line0 10.97.0.2 ──▶ delay, queue, loss ──▶ 10.97.0.1 line0 ── router
//
// Only IPv4 uses the line. If the program ends without a call of stop, the lab's laptop loses its default route.
func (l *Lab) Stretch(line Line) (stop func() error, err error) {
	if line.Queue == 0 {
		line.Queue = LineQueue
	}
	f := l.config.Families()[0]
	far := f.LineNet.Addr().Next()
	laptop, err := l.lineEnd("laptop", netip.PrefixFrom(far.Next(), f.LineNet.Bits()))
	if err != nil {
		return nil, err
	}
	router, err := l.lineEnd("router", netip.PrefixFrom(far, f.LineNet.Bits()))
	if err != nil {
		laptop.Close()
		return nil, err
	}
	if err := l.defaultRoute(far); err != nil {
		laptop.Close()
		router.Close()
		return nil, err
	}
	var ends sync.WaitGroup
	for _, way := range []struct{ from, to *os.File }{{laptop, router}, {router, laptop}} {
		packets := make(chan linePacket, 1<<16)
		ends.Go(func() { line.carry(way.from, packets) })
		ends.Go(func() { deliver(packets, way.to) })
	}
	return func() error {
		err := l.defaultRoute(f.Gateway)
		err = errors.Join(err, laptop.Close(), router.Close())
		ends.Wait()
		return err
	}, nil
}

func (l *Lab) defaultRoute(via netip.Addr) error {
	laptop, err := l.open("laptop")
	if err != nil {
		return err
	}
	defer laptop.Close()
	return laptop.route(netip.PrefixFrom(unspecified(via), 0), via)
}

// lineEnd creates a line's TUN device in a place. The device ends when its file is closed.
func (l *Lab) lineEnd(name string, address netip.Prefix) (*os.File, error) {
	var file *os.File
	err := onThread(func() error {
		if err := enterNet(l.config.namespace(name)); err != nil {
			return err
		}
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "/dev/net/tun", Err: err}
		}
		request, err := unix.NewIfreq(lineLink)
		if err == nil {
			request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
		}
		if err != nil {
			unix.Close(fd)
			return fmt.Errorf("creating %s of %s: %w", lineLink, name, err)
		}
		file = os.NewFile(uintptr(fd), lineLink)
		return nil
	})
	if err != nil {
		return nil, err
	}
	p, err := l.open(name)
	if err == nil {
		defer p.Close()
		err = p.up(lineLink)
	}
	if err == nil {
		err = p.address(lineLink, address)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// linePacket is a packet on the line.
type linePacket struct {
	due   time.Time
	bytes []byte
}

// carry delays, queues and drops the packets that it reads from one end, until that end is closed.
func (line Line) carry(from *os.File, packets chan<- linePacket) {
	defer close(packets)
	idle := time.Now() // the time when the queue will be empty
	buf := make([]byte, lineMTU)
	losing := false
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		losing = rand.Float64() < line.loses(losing)
		now := time.Now()
		if idle.Before(now) {
			idle = now
		}
		if losing || idle.Sub(now) > line.Queue {
			continue
		}
		if line.Rate > 0 {
			idle = idle.Add(time.Duration(float64(8*(n+etherLen)) / line.Rate * float64(time.Second)))
		}
		select {
		case packets <- linePacket{idle.Add(line.RTT / 2), append([]byte(nil), buf[:n]...)}:
		default: // the line is unlimited, and its channel is full
		}
	}
}

// loses returns the probability that a packet is lost. after reports whether the packet before it was.
func (line Line) loses(after bool) float64 {
	switch {
	case line.Burst == 0:
		return line.Loss
	case after:
		return 1 - 1/line.Burst
	}
	return line.Loss / (1 - line.Loss) / line.Burst
}

// deliver writes packets to the other end when they are due.
func deliver(packets <-chan linePacket, to *os.File) {
	for p := range packets {
		time.Sleep(time.Until(p.due))
		_, _ = to.Write(p.bytes) // a packet that the kernel rejects is lost, as on any line
	}
}
