package netstack

import (
	"cmp"
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

// A Device reads and writes packets, as a TUN device of [kubevpn/pkg/datapath/tun] does. A virtio-net header of 10
// bytes precedes every packet; it is zero unless GSO returns true. If USO returns true, Writev takes UDP super-packets.
// One goroutine reads, any number write.
//
// If the device has the method SetReadDeadline, Run uses it to stop reading, and the device can be used again
// afterwards. Otherwise Run calls the method Close if there is one.
type Device interface {
	MTU() int
	GSO() bool
	USO() bool
	Read([]byte) (int, error)
	Writev([][]byte) error
}

// A Dialer opens the far half of a flow from src, the application's address, to dst. The stack calls its methods
// concurrently. They return when ctx ends.
//
// The stack reports an error of a dial or of ReadPacket to the application as errors.Is classifies it:
//
//	syscall.ECONNREFUSED   RST (TCP), ICMP port unreachable (UDP), ICMP host unreachable (echo)
//	syscall.EHOSTUNREACH   ICMP host unreachable
//	syscall.ENETUNREACH    ICMP net unreachable
//	syscall.EACCES         ICMP administratively prohibited
//	any other              nothing; the application's next packet dials again
type Dialer interface {
	// DialTCP returns when the far dial has succeeded or failed. ctx ends after DialTCP has returned, or when the
	// application gives up.
	DialTCP(ctx context.Context, src, dst netip.AddrPort) (Stream, error)
	// DialUDP returns at once, unless the cluster cannot be reached at the moment. ReadPacket returns a refusal. ctx
	// ends with the flow, as for DialEcho.
	DialUDP(ctx context.Context, src, dst netip.AddrPort) (PacketStream, error)
	// DialEcho opens the flow for one program's pings from src to dst. The stack writes requests and reads replies.
	// Each packet is a sequence number (2 bytes, big endian) and the payload.
	DialEcho(ctx context.Context, src, dst netip.Addr) (PacketStream, error)
}

// A Stream is the far half of a TCP flow. The stack reads in one goroutine and writes in another. Read returns io.EOF
// after the far end's FIN. Read and Write return an error that is syscall.ECONNRESET after its RST. The stack calls
// Close last, after both directions have ended.
//
// If a Stream implements io.WriterTo, the stack calls WriteTo instead of Read, and no buffer waits for data. A Stream
// may have the method Gone() <-chan struct{}, whose channel is closed when the far end's RST arrives. Read does not
// report an RST that follows a FIN; without Gone only Write does.
type Stream interface {
	io.ReadWriteCloser
	// CloseWrite sends the far end a FIN. Reads continue.
	CloseWrite() error
	// Reset sends the far end an RST, and ends Read and Write.
	Reset() error
}

// A PacketStream is the far half of a UDP or echo flow. It keeps the boundaries of packets, which may be empty. The
// stack reads in one goroutine and writes in another, and may call Close at any time, which ends both.
//
// A PacketStream may have the method Wait() error, which blocks until ReadPacket would not, and returns the error that
// ReadPacket would return. With it the stack takes a buffer only when a packet has arrived. It may also have the method
// ReadPackets(p []byte, sizes []int) (int, error), which reads as many packets as have arrived and fit into p, where
// they are one behind the other, and into sizes, and returns their number.
type PacketStream interface {
	// ReadPacket reads one packet into p, which has room for the longest packet.
	ReadPacket(p []byte) (int, error)
	WritePacket(p []byte) error
	io.Closer
}

// A PacketForwarder takes the packets that cross to the cluster whole, before the stack sees them. The goroutine that
// reads the device calls Buffer and then Forward for every packet.
type PacketForwarder interface {
	// Buffer returns the buffer for the next packet and its virtio-net header. It is at least as long as a Read of the
	// device requires. It is the same buffer again unless Forward has kept it.
	Buffer() []byte
	// Forward receives a well-formed unicast packet: the first n bytes of Buffer. It returns true if it has taken the
	// packet, to send or to drop it; it may then keep the buffer. If it returns false the stack handles the packet, and
	// the next call of Buffer may return the buffer again.
	Forward(n int, h packet.Header) bool
}

// Config configures a Stack. Device and Dialer are required; zero durations mean their defaults.
type Config struct {
	Device    Device
	Dialer    Dialer
	Forwarder PacketForwarder // nil: the stack handles every packet
	Logger    *slog.Logger    // nil discards

	// A UDP flow ends after UDPIdle (2 minutes) without a packet in either direction; to port 53 after DNSIdle (30
	// seconds). An echo flow ends after EchoIdle (30 seconds).
	UDPIdle, DNSIdle, EchoIdle time.Duration

	// After KeepAliveIdle (1 minute) without a packet from the application's kernel, the stack probes a TCP connection
	// every KeepAliveInterval (15 seconds), and resets it after 5 probes without a reply.
	KeepAliveIdle, KeepAliveInterval time.Duration
}

// Stack is one network stack on one device. Its methods may be called concurrently.
type Stack struct {
	cfg   Config
	log   *slog.Logger
	stats counters
	link  *linkEndpoint

	mu     sync.Mutex
	gv     *stack.Stack // nil before start
	ended  bool
	locals atomic.Pointer[localAddrs]

	tcp       *tcpForwarder
	datagrams datagrams
	ctx       context.Context // ends with Run
	flows     sync.WaitGroup  // goroutines of flows
}

// New creates a Stack. The first call of Run, ListenTCP or ListenUDP starts gVisor's goroutines, and the end of Run
// stops them. So after ListenTCP or ListenUDP the caller must call Run, if only with a context that has ended.
func New(cfg Config) (*Stack, error) {
	if cfg.Device == nil || cfg.Dialer == nil {
		return nil, errors.New("the netstack requires a device and a dialer")
	}
	if mtu := cfg.Device.MTU(); mtu < 1280 || mtu > 65535 {
		return nil, fmt.Errorf("MTU %d is not between 1280, which IPv6 requires, and 65535", mtu)
	}
	cfg.UDPIdle = cmp.Or(cfg.UDPIdle, 2*time.Minute)
	cfg.DNSIdle = cmp.Or(cfg.DNSIdle, 30*time.Second)
	cfg.EchoIdle = cmp.Or(cfg.EchoIdle, 30*time.Second)
	cfg.KeepAliveIdle = cmp.Or(cfg.KeepAliveIdle, time.Minute)
	cfg.KeepAliveInterval = cmp.Or(cfg.KeepAliveInterval, 15*time.Second)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Stack{cfg: cfg, log: cfg.Logger}
	s.link = newLinkEndpoint(cfg.Device, cfg.Forwarder, &s.stats)
	s.locals.Store(&localAddrs{})
	s.datagrams.init(s)
	return s, nil
}

// Run carries packets until ctx ends, and then returns nil, or until the device fails. Before it returns, it aborts all
// flows on both sides, closes the local services and waits for all goroutines. Call it once.
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

// interruptDevice ends Device.Read.
func (s *Stack) interruptDevice() {
	if d, ok := s.cfg.Device.(deadliner); ok {
		if d.SetReadDeadline(time.Unix(1, 0)) == nil {
			return
		}
	}
	if c, ok := s.cfg.Device.(io.Closer); ok {
		if err := c.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			s.log.Warn("cannot close the device", "err", err)
		}
	}
}

// shutdown ends all flows, local services and goroutines. Call it after receive has returned and ctx was canceled.
func (s *Stack) shutdown() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()

	all := func(netip.Addr) bool { return true }
	s.datagrams.end(all)
	done := make(chan struct{})
	go func() {
		s.flows.Wait()
		close(done)
	}()
	// A dial that ends at this moment may register its endpoint after the others were aborted, hence the loop.
	for {
		s.abortTCP(all)
		select {
		case <-done:
			s.gv.Close()
			s.gv.Wait()
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Abort ends the flows to the remote addresses that match, TCP connections by an RST on both sides.
func (s *Stack) Abort(match func(remote netip.Addr) bool) {
	s.mu.Lock()
	running := s.gv != nil && !s.ended
	s.mu.Unlock()
	if running {
		s.datagrams.end(match)
		s.abortTCP(match)
	}
}

// abortTCP resets the connections whose end in the stack, which has the remote address, matches.
func (s *Stack) abortTCP(match func(remote netip.Addr) bool) {
	for _, ep := range s.gv.RegisteredEndpoints() {
		var remote netip.Addr // invalid: of no connection
		if e, ok := ep.(tcpip.Endpoint); ok {
			if at, err := e.GetLocalAddress(); err == nil && at.Addr.Len() > 0 {
				remote = addrOf(at.Addr)
			}
		}
		if match(remote) {
			ep.Abort()
		}
	}
}

// reasonOf returns the ICMP error that reports err to the application, or 0 if none does. PortUnreachable is a refusal,
// which TCP reports by RST instead.
func reasonOf(err error) packet.Reason {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return packet.PortUnreachable
	case errors.Is(err, syscall.EHOSTUNREACH):
		return packet.HostUnreachable
	case errors.Is(err, syscall.ENETUNREACH):
		return packet.NetUnreachable
	case errors.Is(err, syscall.EACCES):
		return packet.Prohibited
	}
	return 0
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
