package router

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

// ListenGateways listens for a gateway. An abstract socket belongs to the pod's network namespace, so no process
// outside of the pod can connect to it.
func ListenGateways(ctx context.Context, name string) (net.Listener, error) {
	var network net.ListenConfig
	return network.Listen(ctx, "unix", name)
}

// serveGateway uses the gateway's device until conn ends. It owns conn. It returns nil when the gateway or ctx ended
// the connection. Its deferred calls must run in this order.
func (r *Router) serveGateway(ctx context.Context, conn net.Conn) (err error) {
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
	messages := unixsocket.NewConn(socket, maxGatewayMessage)
	others.Go(func() {
		if err := r.sendNetworks(ctx, messages); err != nil {
			cancel(err)
		}
	})

	device, about, err := receiveDevice(messages)
	if err != nil {
		return err
	}
	others.Go(func() {
		if err := r.readGateway(device); !errors.Is(err, os.ErrClosed) {
			cancel(fmt.Errorf("reading from the gateway's device: %w", err))
		}
	})
	defer device.Close()
	r.attach(&attachedGateway{device: device, about: about})
	defer r.attach(nil)
	r.log.Info("gateway attached", "device", device.Name(), "mtu", about.MTU, "ipv4", about.IPv4, "ipv6", about.IPv6,
		"backend", about.Backend)
	defer r.log.Info("gateway detached")
	for {
		var about api.Gateway
		if _, err := messages.Receive(&about, ""); err != nil { // only the first one may carry a descriptor
			return gatewayError(err)
		}
		r.attach(&attachedGateway{device: device, about: about})
	}
}

// receiveDevice reads the gateway's first message, which comes with the descriptor of its device.
func receiveDevice(messages *unixsocket.Conn) (device tun.Device, about api.Gateway, err error) {
	messages.SetReadDeadline(time.Now().Add(setupTimeout))
	f, err := messages.Receive(&about, "gateway")
	if err != nil {
		return nil, about, gatewayError(err)
	}
	messages.SetReadDeadline(time.Time{})
	device, err = adopt(f, about.MTU)
	return device, about, err
}

// gatewayError explains the error of a read, unless it is the end.
func gatewayError(err error) error {
	if err == io.EOF {
		return err
	}
	return fmt.Errorf("cannot read from the gateway: %w", err)
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

// adopt returns the Device of the descriptor that the gateway has sent. It owns f, which is nil if there was none.
func adopt(f *os.File, mtu int) (tun.Device, error) {
	if f == nil {
		return nil, errors.New("the gateway sent no device")
	}
	request, err := unix.NewIfreq("")
	if err == nil {
		err = unixsocket.Control(f, func(fd int) error { return unix.IoctlIfreq(fd, unix.TUNGETIFF, request) })
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("the gateway sent a file that is not a TUN device: %w", err)
	}
	return tun.Adopt(f, request.Name(), mtu)
}

// PodRoutes returns the networks to which the pod has routes, without those of loopback and of TUN devices, which
// belong to the gateway.
func PodRoutes() ([]netip.Prefix, error) {
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
