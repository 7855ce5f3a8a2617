package osdns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

// systemBus is the address of the system bus. This package ignores DBUS_SYSTEM_BUS_ADDRESS: the caller controls it, and
// the helper is root.
const systemBus = "unix:path=/run/dbus/system_bus_socket"

const (
	resolvedName  = "org.freedesktop.resolve1"
	resolvedPath  = dbus.ObjectPath("/org/freedesktop/resolve1")
	managerPrefix = "org.freedesktop.resolve1.Manager."
	linkInterface = "org.freedesktop.resolve1.Link"

	noSuchLink    = "org.freedesktop.resolve1.NoSuchLink"
	unknownMethod = "org.freedesktop.DBus.Error.UnknownMethod"
)

// callTimeout limits each call, and linkTimeout the wait until resolved notices a new link.
const (
	callTimeout = 5 * time.Second
	linkTimeout = 2 * time.Second
)

// resolved talks to systemd-resolved (org.freedesktop.resolve1(5)).
type resolved struct {
	conn    *dbus.Conn
	manager dbus.BusObject
	signals chan *dbus.Signal // owner changes of the name, and property changes of the manager
	links   map[string]int32  // the configured links: name to index
}

// openResolved connects to the bus. It does not start resolved.
func openResolved(address string) (*resolved, error) {
	if address == "" {
		address = systemBus
	}
	conn, err := dbus.Connect(address)
	if err != nil {
		return nil, fmt.Errorf("connecting to the system bus: %w", err)
	}
	r := &resolved{
		conn:    conn,
		manager: conn.Object(resolvedName, resolvedPath),
		signals: make(chan *dbus.Signal, 16),
		links:   map[string]int32{},
	}
	conn.Signal(r.signals)
	err = errors.Join(
		conn.AddMatchSignal(
			dbus.WithMatchSender("org.freedesktop.DBus"), dbus.WithMatchInterface("org.freedesktop.DBus"),
			dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, resolvedName)),
		conn.AddMatchSignal(
			dbus.WithMatchSender(resolvedName), dbus.WithMatchObjectPath(resolvedPath),
			dbus.WithMatchInterface("org.freedesktop.DBus.Properties"), dbus.WithMatchMember("PropertiesChanged")),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribing to the system bus: %w", err), conn.Close())
	}
	return r, nil
}

// running returns an error unless resolved runs and sees this namespace's links. The bus of a container or a network
// namespace may be the host's, where a link's number belongs to another link.
func (r *resolved) running() error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	var pid uint32
	err := r.conn.BusObject().CallWithContext(ctx, "org.freedesktop.DBus.GetConnectionUnixProcessID", 0,
		resolvedName).Store(&pid)
	if isOwnerGone(err) {
		return errors.New("it does not run")
	}
	if err != nil {
		return fmt.Errorf("asking the system bus: %w", err)
	}
	same, err := unixsocket.SharesNetwork(int(pid))
	if err != nil {
		return fmt.Errorf("looking at its network namespace: %w", err)
	}
	if !same {
		return errors.New("it runs in another network namespace")
	}
	return nil
}

func (r *resolved) call(method string, args ...any) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	if err := r.manager.CallWithContext(ctx, managerPrefix+method, dbus.FlagNoAutoStart, args...).Err; err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	return nil
}

// linkAddress and linkDomain are the (iay) and (sb) of SetLinkDNS and SetLinkDomains.
type linkAddress struct {
	Family  int32
	Address []byte
}

type linkDomain struct {
	Name        string
	RoutingOnly bool
}

func addressOf(a netip.Addr) linkAddress {
	if a.Is4() {
		return linkAddress{unix.AF_INET, a.AsSlice()}
	}
	return linkAddress{unix.AF_INET6, a.AsSlice()}
}

// domainsOf returns the search domains, which resolved also matches, and then the other match domains.
func domainsOf(l Link) []linkDomain {
	out := []linkDomain{}
	for _, d := range l.SearchDomains {
		out = append(out, linkDomain{d, false})
	}
	for _, d := range l.MatchDomains {
		if !slices.Contains(l.SearchDomains, d) {
			out = append(out, linkDomain{d, true})
		}
	}
	return out
}

// set configures the links that have a resolver, and reverts the others.
func (r *resolved) set(links []Link) error {
	var errs []error
	for name, index := range r.links {
		if !slices.ContainsFunc(links, func(l Link) bool { return l.Name == name && l.Resolver.IsValid() }) {
			errs = append(errs, r.revert(name, index))
		}
	}
	for _, l := range links {
		if !l.Resolver.IsValid() {
			continue
		}
		if err := r.setLink(l); err != nil {
			errs = append(errs, fmt.Errorf("link %s: %w", l.Name, err))
		}
	}
	// Its cache may contain names of the cluster, or that a name does not exist.
	if err := r.call("FlushCaches"); len(links) > 0 || !isOwnerGone(err) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (r *resolved) setLink(l Link) error {
	link, err := net.InterfaceByName(l.Name)
	if err != nil {
		return err
	}
	index := int32(link.Index)
	err = r.call("SetLinkDNS", index, []linkAddress{addressOf(l.Resolver)})
	// resolved learns of a new link from the kernel, as we did, but perhaps later.
	for deadline := time.Now().Add(linkTimeout); errorName(err) == noSuchLink && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
		err = r.call("SetLinkDNS", index, []linkAddress{addressOf(l.Resolver)})
	}
	if err != nil {
		return err
	}
	r.links[l.Name] = index
	if err := r.call("SetLinkDomains", index, domainsOf(l)); err != nil {
		return err
	}
	for _, c := range []struct {
		method string
		value  any
	}{
		{"SetLinkDefaultRoute", false}, // systemd 240
		{"SetLinkLLMNR", "no"},
		{"SetLinkMulticastDNS", "no"},
		{"SetLinkDNSSEC", "no"},     // a cluster's zone is not signed, and the root says that it does not exist
		{"SetLinkDNSOverTLS", "no"}, // systemd 239
	} {
		if err := r.call(c.method, index, c.value); err != nil && errorName(err) != unknownMethod {
			return err
		}
	}
	return nil
}

// inForce reports whether resolved still has the settings of setLink.
func (r *resolved) inForce(links []Link) bool {
	for _, l := range links {
		if !l.Resolver.IsValid() {
			continue
		}
		var path dbus.ObjectPath
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		err := r.manager.CallWithContext(ctx, managerPrefix+"GetLink", dbus.FlagNoAutoStart,
			r.links[l.Name]).Store(&path)
		cancel()
		if err != nil {
			return false
		}
		object := r.conn.Object(resolvedName, path)
		var servers []linkAddress
		var domains []linkDomain
		if object.StoreProperty(linkInterface+".DNS", &servers) != nil ||
			object.StoreProperty(linkInterface+".Domains", &domains) != nil {
			return false
		}
		want := addressOf(l.Resolver)
		if len(servers) != 1 || servers[0].Family != want.Family || !slices.Equal(servers[0].Address, want.Address) {
			return false
		}
		if wanted := domainsOf(l); !slices.Equal(sorted(domains), sorted(wanted)) {
			return false
		}
	}
	return true
}

func sorted(list []linkDomain) []linkDomain {
	slices.SortFunc(list, func(a, b linkDomain) int { return strings.Compare(a.Name, b.Name) })
	return list
}

func (r *resolved) revert(name string, index int32) error {
	err := r.call("RevertLink", index)
	if errorName(err) == noSuchLink || isOwnerGone(err) {
		err = nil // the settings ended with the link, or with resolved
	}
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	delete(r.links, name)
	return nil
}

// close reverts every link and closes the bus connection.
func (r *resolved) close() error {
	var err error
	if len(r.links) > 0 {
		err = r.set(nil)
	}
	r.conn.RemoveSignal(r.signals)
	return errors.Join(err, r.conn.Close())
}

// errorName returns the name of the D-Bus error in err, or "".
func errorName(err error) string {
	var e dbus.Error
	errors.As(err, &e)
	return e.Name
}

func isOwnerGone(err error) bool {
	switch errorName(err) {
	case "org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner",
		"org.freedesktop.DBus.Error.NoReply":
		return true
	}
	return errors.Is(err, dbus.ErrClosed)
}
