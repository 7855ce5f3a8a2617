package helper

import (
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
)

func markedSocket(network string, mark uint32) (*os.File, error) {
	family, kind := unix.AF_INET, unix.SOCK_DGRAM
	switch network {
	case "udp4":
	case "udp6":
		family = unix.AF_INET6
	case "tcp4":
		kind = unix.SOCK_STREAM
	case "tcp6":
		family, kind = unix.AF_INET6, unix.SOCK_STREAM
	default:
		return nil, refused("a socket of type %q: it must be udp4, udp6, tcp4 or tcp6", network)
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "cannot create a %s socket: %w", network, err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		unix.Close(fd)
		return nil, api.Errorf(api.ExitNetwork, "cannot mark a socket: %w", err)
	}
	return os.NewFile(uintptr(fd), network), nil
}

// removeLeftLinks removes devices of kubevpn that no process has open. Normally there are none, because they are not
// persistent.
func removeLeftLinks() (did []string, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("cannot list links: %w", err)
	}
	for _, link := range links {
		t, ok := link.(*netlink.Tuntap)
		// A device that is up and that a process has open has a link partner: the kernel calls it running.
		if !ok || !linkName.MatchString(t.Name) || t.NonPersist || t.RawFlags&unix.IFF_LOWER_UP != 0 {
			continue
		}
		if err := netlink.LinkDel(link); err != nil {
			return did, fmt.Errorf("cannot remove %s: %w", t.Name, err)
		}
		did = append(did, "removed the device "+t.Name+", which no process had open")
	}
	return did, nil
}
