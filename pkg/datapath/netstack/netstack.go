package netstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"kubevpn/pkg/datapath/packet"
)

// A Device is where packets come from and go to: a TUN device. Every packet is preceded by a virtio-net header of 10
// bytes, which is zero unless GSO. One goroutine reads, any number writes. [kubevpn/pkg/datapath/tun] has them.
//
// If the device has the method SetReadDeadline, Run uses it to stop reading, and the device can be used again
// afterwards. Otherwise Run calls Close if there is one.
type Device interface {
	MTU() int
	GSO() bool
	Read([]byte) (int, error)
	Writev([][]byte) error
}

// A Dialer opens the far half of a flow. src is the application's address, dst the one that it wants to reach. Its
// methods are called concurrently, and return when ctx ends.
//
// The application is told about an error, of a dial or of ReadPacket, as errors.Is finds it:
//
//	syscall.ECONNREFUSED   RST (TCP), ICMP port unreachable (UDP), ICMP host unreachable (echo)
//	syscall.EHOSTUNREACH   ICMP host unreachable
//	syscall.ENETUNREACH    ICMP net unreachable
//	syscall.EACCES         ICMP administratively prohibited
//	anything else          nothing; when the application tries again, so does the stack
type Dialer interface {
	// DialTCP returns when the far dial has succeeded or failed. ctx ends with the dial, not with the stream: earlier
	// when the application gives up.
	DialTCP(ctx context.Context, src, dst netip.AddrPort) (Stream, error)
	// DialUDP returns at once, unless there is no way to the cluster at the moment; a refusal arrives as an error of
	// ReadPacket. ctx ends with the flow, as for DialEcho.
	DialUDP(ctx context.Context, src, dst netip.AddrPort) (PacketStream, error)
	// DialEcho is for pings from src to dst by one program. Packets of the stream are 2 bytes sequence number (big
	// endian) and the payload; those written are requests, those read are replies.
	DialEcho(ctx context.Context, src, dst netip.Addr) (PacketStream, error)
}

// A Stream is the far half of a TCP flow. The stack reads in one goroutine and writes in another. Read returns io.EOF
// after the far end's FIN, and an error that is syscall.ECONNRESET after its RST, as Write does. Reset gives the far
// end an RST, and ends Read and Write here. Close is called last, after both directions have ended.
//
// A Stream that implements io.WriterTo is read with it, so that no buffer of ours waits for data. One may have the
// method Gone() <-chan struct{}, whose channel is closed by the far end's RST. It tells of an RST after the far end's
// FIN, which Read does not; without it, only Write does.
type Stream interface {
	io.ReadWriteCloser
	// CloseWrite gives the far end a FIN. Reading goes on.
	CloseWrite() error
	Reset() error
}

// A PacketStream is the far half of a UDP or echo flow. Boundaries between packets are kept, and packets may be empty.
// The stack reads in one goroutine and writes in another, and may Close at any time, which ends both.
//
// A PacketStream may have the method Wait() error, which blocks until ReadPacket would not, and returns the error that
// it would. The stack then takes a buffer only for packets that are there.
type PacketStream interface {
	// ReadPacket reads one packet into p, which has room for the longest.
	ReadPacket(p []byte) (int, error)
	WritePacket(p []byte) error
	io.Closer
}

// A PacketForwarder takes packets that cross to the cluster whole, before the stack sees them. The goroutine that reads
// the device calls Buffer and then Forward for every packet.
type PacketForwarder interface {
	// Buffer returns the buffer for the next packet and its virtio-net header, of at least the size that a Read of the
	// device needs. It returns the same buffer again unless Forward has kept it.
	Buffer() []byte
	// Forward gets a well-formed unicast packet: the first n bytes of Buffer. It returns true if it has taken the
	// packet, to send or to drop it; it may then keep the buffer. If it returns false the stack handles the packet, and
	// the buffer is free again at the next call of Buffer.
	Forward(n int, h packet.Header) bool
}

// Config is what a Stack works with. Device and Dialer are required; zero durations mean their defaults.
type Config struct {
	Device    Device
	Dialer    Dialer
	Forwarder PacketForwarder // nil: every packet is the stack's
	Logger    *slog.Logger

	// A UDP flow ends when no packet has come from either side for UDPIdle (2 minutes); on port 53 DNSIdle (30
	// seconds). An echo flow ends after EchoIdle (30 seconds).
	UDPIdle, DNSIdle, EchoIdle time.Duration

	// A TCP connection on which nothing comes from the application's kernel for KeepAliveIdle (1 minute) is probed
	// every KeepAliveInterval (15 seconds), and reset after 5 probes without an answer.
	KeepAliveIdle, KeepAliveInterval time.Duration
}

// Stack is one network stack on one device.
type Stack struct {
	cfg   Config
	log   *slog.Logger
	stats counters
	link  *link

	mu     sync.Mutex
	gv     *stack.Stack // nil before start
	ended  bool
	locals atomic.Pointer[localAddrs]

	tcp       *tcpForwarder
	datagrams datagrams
	ctx       context.Context // of Run
	flows     sync.WaitGroup  // goroutines of flows
}

// New makes a Stack. It starts nothing: the first call of Run, ListenTCP or ListenUDP does, and the end of Run stops
// everything, so a Stack that was given a Listen needs a Run, if only with a context that has ended.
func New(cfg Config) (*Stack, error) {
	if cfg.Device == nil || cfg.Dialer == nil {
		return nil, errors.New("a netstack needs a device and a dialer")
	}
	if mtu := cfg.Device.MTU(); mtu < 1280 || mtu > 65535 {
		return nil, fmt.Errorf("an MTU of %d is not between 1280, which IPv6 needs, and 65535", mtu)
	}
	orDefault(&cfg.UDPIdle, 2*time.Minute)
	orDefault(&cfg.DNSIdle, 30*time.Second)
	orDefault(&cfg.EchoIdle, 30*time.Second)
	orDefault(&cfg.KeepAliveIdle, time.Minute)
	orDefault(&cfg.KeepAliveInterval, 15*time.Second)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Stack{cfg: cfg, log: cfg.Logger}
	s.link = newLink(cfg.Device, cfg.Forwarder, &s.stats)
	s.locals.Store(&localAddrs{})
	s.datagrams.init(s)
	return s, nil
}

func orDefault(d *time.Duration, value time.Duration) {
	if *d == 0 {
		*d = value
	}
}

// Run carries packets until ctx ends, and then returns nil, or until the device fails. Before it returns, all flows are
// aborted on both sides, local services are closed, and no goroutine is left. It can be called once.
func (s *Stack) Run(ctx context.Context) error {
	if err := s.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.ctx = ctx
	stop := context.AfterFunc(ctx, s.interruptDevice)
	err := s.link.receive()
	interrupted := !stop()
	cancel()
	s.shutdown()
	if interrupted {
		if d, ok := s.cfg.Device.(deadliner); ok {
			d.SetReadDeadline(time.Time{})
		}
		return nil
	}
	return fmt.Errorf("reading packets: %w", err)
}

type deadliner interface{ SetReadDeadline(time.Time) error }

func (s *Stack) interruptDevice() {
	if d, ok := s.cfg.Device.(deadliner); ok {
		if d.SetReadDeadline(time.Unix(1, 0)) == nil {
			return
		}
	}
	if c, ok := s.cfg.Device.(io.Closer); ok {
		if err := c.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			s.log.Warn("closing the device", "err", err)
		}
	}
}

// shutdown ends everything after reading has ended and the flows' context is cancelled.
func (s *Stack) shutdown() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()

	s.datagrams.closeAll()
	done := make(chan struct{})
	go func() {
		s.flows.Wait()
		close(done)
	}()
	// Connections whose dial ends just now may be registered after the others were aborted, hence the loop.
	for {
		for _, ep := range s.gv.RegisteredEndpoints() {
			ep.Abort()
		}
		select {
		case <-done:
			s.gv.Close()
			s.gv.Wait()
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// verdict is what an application is told about an error.
type verdict uint8

const (
	silent verdict = iota
	refused
	hostUnreachable
	netUnreachable
	prohibited
)

func judge(err error) verdict {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case errors.Is(err, syscall.EHOSTUNREACH):
		return hostUnreachable
	case errors.Is(err, syscall.ENETUNREACH):
		return netUnreachable
	case errors.Is(err, syscall.EACCES):
		return prohibited
	}
	return silent
}

func addrOf(a tcpip.Address) netip.Addr {
	if a.Len() == 4 {
		return netip.AddrFrom4(a.As4())
	}
	return netip.AddrFrom16(a.As16())
}

func tcpipAddr(a netip.Addr) tcpip.Address {
	if a.Is4() {
		return tcpip.AddrFrom4(a.As4())
	}
	return tcpip.AddrFrom16(a.As16())
}
