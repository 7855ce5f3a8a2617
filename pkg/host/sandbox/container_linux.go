package sandbox

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

const (
	// engineTable and enginePriority are the numbers of the routing table and the rule for replies from published
	// ports. The container has its own network namespace, so they cannot collide with others.
	engineTable    = 100
	enginePriority = 100
)

// Serve creates a TUN device in the network namespace of this process, sends its file to [Attach] at the other end of
// conn, and executes the calls of the [Remote] there. [Remote.Update] writes into the empty directory volumes. Serve
// returns nil when the other end closes conn. It owns conn, and needs CAP_NET_ADMIN and /dev/net/tun.
//
//	         ┌── main table: default ─▶ tun0 ─▶ Remote.TUN
//	a packet ┤
//	         └── from eth0's address ─▶ table 100: default ─▶ eth0 ─▶ the engine
//
// Flows that programs of the container start use the TUN; replies to clients of a published port use the engine's
// routes. Serve writes /etc/resolv.conf and /etc/hosts in place, because an engine bind-mounts them from files that all
// containers of one network share.
func Serve(conn *net.UnixConn, volumes string) error {
	defer conn.Close()
	f := newServer(unixsocket.NewConn(conn, maxMessage), ContainerInterface)
	f.setNames = func(n *Network) error {
		err := os.WriteFile(resolvConfFile, []byte(n.resolvConf()), 0o644)
		if hosts := n.hostsFile(); hosts != "" {
			err = errors.Join(err, os.WriteFile(hostsFile, []byte(hosts), 0o644))
		}
		return err
	}
	device, err := f.prepare(volumes)
	if err != nil {
		f.send(report{Error: subreaper.NewFailure(err)}, nil)
		return err
	}
	f.sendReady(device)
	return f.serve()
}

// ServeProgram is the first process of a container. It passes start the program of [Remote.Run] at the other end of
// conn, sends the program the signals of [Remote.Signal], and returns its exit code. When the other end closes conn, it
// ends this process. It owns conn.
func ServeProgram(
	conn *net.UnixConn, start func(subreaper.Program) (*subreaper.Process, error),
) (exit int, err error) {
	s := newServer(unixsocket.NewConn(conn, maxMessage), "")
	s.start = start
	s.sendReady(nil)
	go func() {
		_ = s.serve() // an error ends this process as well
		os.Exit(128 + int(unix.SIGKILL))
	}()
	return s.wait().Code, nil
}

func (s *server) prepare(volumes string) (device *os.File, err error) {
	if s.store, err = openStore(volumes); err != nil {
		return nil, err
	}
	if device, err = openTUN(ContainerInterface); err != nil {
		return nil, err
	}
	if err := moveEngineRoutes(); err != nil {
		device.Close()
		return nil, fmt.Errorf("moving the routes of the container engine: %w", err)
	}
	return device, nil
}

// moveEngineRoutes moves the routes of links that have a default route to a table that only replies use, because a
// cluster may use the addresses of the engine's bridge.
func moveEngineRoutes() error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN},
			netlink.RT_FILTER_TABLE)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			return err
		}
		moved := map[int]bool{} // links with a default route
		for _, r := range routes {
			if !isDefault(r) || moved[r.LinkIndex] {
				continue
			}
			moved[r.LinkIndex] = true
			if err := ruleFor(family, r.LinkIndex, routes); err != nil {
				return err
			}
		}
		for _, r := range routes {
			// link-local routes lead only to neighbours
			if !moved[r.LinkIndex] || r.Dst != nil && r.Dst.IP.IsLinkLocalUnicast() {
				continue
			}
			if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("removing %v: %w", r, err)
			}
		}
	}
	return nil
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// ruleFor makes packets from a link's addresses follow the link's routes.
func ruleFor(family, index int, routes []netlink.Route) error {
	for _, r := range routes {
		if r.LinkIndex != index {
			continue
		}
		r.Table = engineTable
		r.Flags &= int(netlink.FLAG_ONLINK) // the kernel sets the other flags, such as linkdown, and rejects them here
		if err := netlink.RouteReplace(&r); err != nil {
			return fmt.Errorf("adding %v: %w", r, err)
		}
	}
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return err
	}
	addrs, err := netlink.AddrList(link, family)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		rule := netlink.NewRule()
		rule.Family, rule.Table, rule.Priority = family, engineTable, enginePriority
		rule.Src = &net.IPNet{IP: a.IP, Mask: net.CIDRMask(len(a.Mask)*8, len(a.Mask)*8)}
		if err := netlink.RuleAdd(rule); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding %v: %w", rule, err)
		}
	}
	return nil
}
