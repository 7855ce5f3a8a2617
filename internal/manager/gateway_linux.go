package manager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/unixsocket"
)

// listenGateways listens for a gateway. An abstract socket belongs to the pod's network namespace, so no process
// outside of the pod can connect to it.
func listenGateways(ctx context.Context, name string) (net.Listener, error) {
	var network net.ListenConfig
	return network.Listen(ctx, "unix", name)
}

// serveGateway uses the gateway's device until conn ends. It owns conn. It returns nil when the gateway or ctx ended
// the connection. Its deferred calls must run in this order.
func (m *Manager) serveGateway(ctx context.Context, conn net.Conn) (err error) {
	var others sync.WaitGroup
	defer others.Wait()
	defer conn.Close()
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("unexpected network %s", conn.LocalAddr().Network())
	}
	if err := fromRoot(socket); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// The first failure closes the connection, which ends the other goroutines.
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	defer func() {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		if errors.Is(err, context.Canceled) || errors.Is(err, io.EOF) {
			err = nil
		}
	}()
	others.Go(func() {
		if err := m.sendNetworks(ctx, conn); err != nil {
			cancel(err)
		}
	})

	in := &descriptorReader{conn: socket}
	defer in.close()
	lines := api.NewLines(in, maxGatewayLine)
	device, about, err := receiveDevice(in, lines)
	if err != nil {
		return err
	}
	others.Go(func() {
		if err := m.router.readGateway(device); !errors.Is(err, os.ErrClosed) {
			cancel(fmt.Errorf("reading from the gateway's device: %w", err))
		}
	})
	defer device.Close()
	m.router.attach(&gateway{device: device, about: *about})
	defer m.router.attach(nil)
	m.log.Info("gateway attached", "device", device.Name(), "mtu", about.MTU, "ipv4", about.IPv4, "ipv6", about.IPv6,
		"backend", about.Backend)
	defer m.log.Info("gateway detached")
	for {
		about, err := nextGateway(lines)
		if err != nil {
			return err
		}
		in.close() // only the first line may carry a descriptor
		m.router.attach(&gateway{device: device, about: *about})
	}
}

// receiveDevice reads the gateway's first line, which comes with the descriptor of its device.
func receiveDevice(in *descriptorReader, lines *api.Lines) (tun.Device, *api.Gateway, error) {
	in.conn.SetReadDeadline(time.Now().Add(setupTimeout))
	about, err := nextGateway(lines)
	if err != nil {
		return nil, nil, err
	}
	in.conn.SetReadDeadline(time.Time{})
	device, err := adopt(in.take(), about.MTU)
	return device, about, err
}

// fromRoot returns an error unless the other end is a process of uid 0, because a gateway passes packets to the pod's
// kernel and describes itself to laptops.
func fromRoot(conn *net.UnixConn) error {
	who, err := unixsocket.Peer(conn)
	if err != nil {
		return fmt.Errorf("rejected a gateway connection: %w", err)
	}
	if who.Uid != 0 {
		return fmt.Errorf("rejected a gateway connection of process %d: it runs as user %d instead of root", who.Pid,
			who.Uid)
	}
	return nil
}

// nextGateway reads the gateway's next line. It returns io.EOF at the end.
func nextGateway(lines *api.Lines) (*api.Gateway, error) {
	var about api.Gateway
	if err := lines.Next(&about); err == io.EOF {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("cannot read from the gateway: %w", err)
	}
	return &about, nil
}

// adopt returns the Device of the descriptor that the gateway has sent. It owns f, which is nil if there was none.
func adopt(f *os.File, mtu int) (tun.Device, error) {
	if f == nil {
		return nil, errors.New("the gateway sent no device")
	}
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("cannot use the gateway's device: %w", err)
	}
	request, err := unix.NewIfreq("")
	if err == nil {
		var asked error
		err = raw.Control(func(fd uintptr) { asked = unix.IoctlIfreq(int(fd), unix.TUNGETIFF, request) })
		err = errors.Join(err, asked)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("the gateway sent a file that is not a TUN device: %w", err)
	}
	return tun.Adopt(f, request.Name(), mtu)
}

// descriptorReader reads bytes from a unix socket, and the descriptors that come with them.
type descriptorReader struct {
	conn  *net.UnixConn
	files []*os.File
}

func (r *descriptorReader) Read(p []byte) (int, error) {
	control := make([]byte, unix.CmsgSpace(4*16))
	n, cn, _, _, err := r.conn.ReadMsgUnix(p, control)
	if cn > 0 {
		files, filesErr := unixsocket.Files(control[:cn], "gateway")
		r.files = append(r.files, files...)
		if filesErr != nil {
			return n, filesErr
		}
	}
	return n, err
}

// take returns the first descriptor, or nil, and closes the others. The caller owns the result.
func (r *descriptorReader) take() *os.File {
	if len(r.files) == 0 {
		return nil
	}
	f := r.files[0]
	r.files = r.files[1:]
	r.close()
	return f
}

func (r *descriptorReader) close() {
	for _, f := range r.files {
		f.Close()
	}
	r.files = nil
}

// podRoutes returns the networks to which the pod has routes, without those of loopback and of TUN devices, which
// belong to the gateway.
func podRoutes() ([]netip.Prefix, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	ours := make(map[int]bool)
	for _, l := range links {
		if l.Type() == "tuntap" || l.Type() == "tun" || l.Attrs().Flags&net.FlagLoopback != 0 {
			ours[l.Attrs().Index] = true
		}
	}
	list, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("listing routes: %w", err)
	}
	var prefixes []netip.Prefix
	for _, r := range list {
		if r.Dst == nil || ours[r.LinkIndex] {
			continue
		}
		if p, ok := netipx.FromStdIPNet(r.Dst); ok {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes, nil
}
