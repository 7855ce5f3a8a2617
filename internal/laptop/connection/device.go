package connection

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/osdns"
)

const (
	// removeTimeout limits the removal of the link.
	removeTimeout = 5 * time.Second
	// maxPlans limits the plans after the first one, each of which another connection has made obsolete.
	maxPlans = 3
	// tunnels limits the tunnels of one machine, for all users together.
	tunnels = 64
)

// bringUp creates the device with its routes and names, and starts the netstack in g. For a proxy it only sets the
// proxy's routes and names.
func (r *routes) bringUp(ctx context.Context, g *errgroup.Group) error {
	done := r.status.step("Configuring the network")
	if !r.cfg.proxied() && !r.cfg.isolated() {
		// No route contains a nameserver of this machine: the service of the helper would refuse the first state.
		if i, err := osdns.Inspect(osdns.Options{}, nil); err == nil {
			r.applied.Upstreams = i.Nameservers
		} else {
			r.log.Debug("cannot find the nameservers of this machine; the helper names them later", "err", err)
		}
	}
	p, err := r.firstPlan()
	if err != nil {
		return err
	}
	if r.cfg.proxied() {
		if err := r.apply(ctx, p); err != nil {
			return err
		}
		done("of the proxy; the network of this machine does not change")
		return nil
	}
	f, err := r.createTUN(ctx)
	if err != nil {
		return err
	}
	opened, err := tun.Adopt(f, f.Name(), mtu)
	if err != nil {
		return err
	}
	r.device = &tun.Mapped{Device: opened}
	var device tun.Device = r.device
	stack, err := netstack.New(netstack.Config{Device: device, Dialer: r.dialer(), Forwarder: r.packets, Logger: r.log})
	if err != nil {
		return errors.Join(err, device.Close())
	}
	r.packets.device.Store(&device)
	r.stack.Store(stack)
	g.Go(func() error { return r.runStack(ctx, stack, device) })
	g.Go(func() error { r.packets.run(ctx); return nil })
	r.zone.serve = func(at netip.Addr) (func(), error) { return r.serveDNS(ctx, g, stack, at) }
	err = r.apply(ctx, p)
	for tries := 0; tries < maxPlans && api.AsError(err) != nil && api.AsError(err).Code == api.ExitOverlap; tries++ {
		if p, err = r.firstPlan(); err == nil { // another connection has come meanwhile
			err = r.apply(ctx, p)
		}
	}
	if err != nil {
		return err
	}
	done("%s, names by way of %s", device.Name(), r.applied.ResolverMode)
	return nil
}

// firstPlan returns the first plan. It fails if the plan needs the user's consent, or conflicts with this machine.
func (r *routes) firstPlan() (planned, error) {
	p, err := r.plan()
	if err != nil {
		return planned{}, err
	}
	switch {
	case len(p.Ask) > 0:
		return planned{}, consentError(p.Ask)
	case !p.Found:
		return planned{}, api.Errorf(api.ExitPermission, "cannot find the pod and Service networks of the cluster").
			WithHint("Name them with --extra-cidr, or ask an admin to run `kubevpn install`, which lets the manager " +
				"read them.")
	}
	if len(p.Overlaps) > 0 {
		return planned{}, overlapError(p.Overlaps)
	}
	return p, nil
}

// freeDevice returns the first name for a tunnel that no device of this machine has. All users share the numbers.
func freeDevice() (string, error) {
	if runtime.GOOS == "darwin" {
		return "utun", nil // the kernel appends the first free number
	}
	for n := range tunnels {
		if name := fmt.Sprint("kubevpn", n); !deviceExists(name) {
			return name, nil
		}
	}
	return "", api.Errorf(api.ExitOverlap, "all %d names for tunnels of this machine are in use", tunnels).
		WithHint("`ip link` shows them.")
}

func deviceExists(name string) bool {
	_, err := net.InterfaceByName(name)
	return err == nil
}

// createTUN creates the device with the first free name. If another program takes the name meanwhile, it uses the next
// one.
func (r *routes) createTUN(ctx context.Context) (*os.File, error) {
	for left := 2; ; left-- {
		name, err := freeDevice()
		if err != nil {
			return nil, err
		}
		f, err := r.cfg.Network.CreateTUN(ctx, name, mtu)
		if err == nil || left == 0 || !deviceExists(name) {
			return f, err
		}
	}
}

// runStack runs the netstack until ctx ends, then removes the link and closes the device.
func (r *routes) runStack(ctx context.Context, stack *netstack.Stack, device tun.Device) error {
	err := stack.Run(ctx)
	if ctx.Err() == nil && err != nil {
		err = api.Errorf(api.ExitLost, "the TUN device is gone: %w", err).WithHint("Run `kubevpn connect` again.")
	}
	remove, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if removeErr := r.cfg.Network.RemoveLink(remove); removeErr != nil {
		r.log.Info("cannot remove the link", "err", removeErr) // the helper may have ended, and removed it
	}
	if closeErr := device.Close(); closeErr != nil && !errors.Is(closeErr, os.ErrClosed) {
		err = errors.Join(err, closeErr)
	}
	return err
}

// serveDNS answers DNS inside the tunnel: at addr for resolvers that want a server per link, and at the next address
// for programs with a search list of their own.
func (r *routes) serveDNS(ctx context.Context, g *errgroup.Group, stack *netstack.Stack,
	addr netip.Addr) (stop func(), err error) {
	stop, err = r.serveDNSAt(ctx, g, stack, addr, "")
	if err != nil {
		return nil, err
	}
	also, err := r.serveDNSAt(ctx, g, stack, addr.Next(), r.cluster.ConnectionID())
	if err != nil {
		stop()
		return nil, err
	}
	return func() { stop(); also() }, nil
}

// serveDNSAt answers DNS at one address. zone is that of Network.ServeDNS.
func (r *routes) serveDNSAt(ctx context.Context, g *errgroup.Group, stack *netstack.Stack, addr netip.Addr,
	zone string) (stop func(), err error) {
	at := netip.AddrPortFrom(addr, 53)
	packets, err := stack.ListenUDP(at)
	if err != nil {
		return nil, fmt.Errorf("answering DNS inside the tunnel: %w", err)
	}
	listener, err := stack.ListenTCP(at)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("answering DNS inside the tunnel: %w", err), packets.Close())
	}
	ctx, stop = context.WithCancel(ctx)
	g.Go(func() error {
		defer stop()
		err := r.cfg.Network.ServeDNS(ctx, zone, []net.PacketConn{packets}, []net.Listener{listener})
		if ctx.Err() == nil && err != nil {
			return fmt.Errorf("answering DNS inside the tunnel: %w", err)
		}
		return nil
	})
	return stop, nil
}
