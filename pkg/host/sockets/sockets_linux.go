package sockets

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// List returns the UDP sockets, and the TCP sockets that connect or are connected, whose local address keep accepts.
func List(keep func(local netip.Addr) bool) ([]Socket, error) {
	var all []Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		streams, err := netlink.SocketDiagTCPInfo(family)
		if err := usable(err); err != nil {
			return nil, fmt.Errorf("cannot list TCP sockets: %w", err)
		}
		for _, s := range streams {
			if found, ok := socketOf(unix.IPPROTO_TCP, s.InetDiagMsg, keep); ok && s.TCPInfo != nil {
				found.TCP = tcpOf(s)
				all = append(all, found)
			}
		}
		datagrams, err := netlink.SocketDiagUDP(family)
		if err := usable(err); err != nil {
			return nil, fmt.Errorf("cannot list UDP sockets: %w", err)
		}
		for _, s := range datagrams {
			if found, ok := socketOf(unix.IPPROTO_UDP, s, keep); ok {
				all = append(all, found)
			}
		}
	}
	return all, nil
}

// usable returns nil if the list that came with err can be used: the kernel also reports that sockets came and went
// meanwhile, or that it has no IPv6.
func usable(err error) error {
	if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	return err
}

func socketOf(proto uint8, s *netlink.Socket, keep func(netip.Addr) bool) (Socket, bool) {
	switch s.State {
	// the states in which no program exchanges bytes
	case netlink.TCP_SYN_RECV, netlink.TCP_TIME_WAIT, netlink.TCP_CLOSE, netlink.TCP_LISTEN, netlink.TCP_NEW_SYN_REC:
		if proto == unix.IPPROTO_TCP {
			return Socket{}, false
		}
	}
	local := addrOf(s.ID.Source)
	if !keep(local) {
		return Socket{}, false
	}
	return Socket{
		Proto: proto, Inode: s.INode, Unread: int(s.RQueue),
		Local:  netip.AddrPortFrom(local, s.ID.SourcePort),
		Remote: netip.AddrPortFrom(addrOf(s.ID.Destination), s.ID.DestinationPort),
	}, true
}

func addrOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

func tcpOf(s *netlink.InetDiagTCPInfoResp) *TCP {
	info := s.TCPInfo
	sent := info.Bytes_acked
	if sent > 0 {
		sent-- // the SYN
	}
	return &TCP{
		Connecting: s.InetDiagMsg.State == netlink.TCP_SYN_SENT, Sent: sent, Received: info.Bytes_received,
		Unsent: int(s.InetDiagMsg.WQueue), RTT: time.Duration(info.Rtt) * time.Microsecond,
		Retransmits: info.Total_retrans,
	}
}

// Owners returns the programs that have these sockets, as far as this process may see them. It reads the descriptors of
// all of these programs, so a caller should remember the result.
func Owners(inodes map[uint32]bool) (map[uint32]Process, error) {
	found := map[uint32]Process{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("cannot list processes: %w", err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || len(found) == len(inodes) {
			continue
		}
		dir := filepath.Join("/proc", entry.Name(), "fd")
		descriptors, err := os.ReadDir(dir)
		if err != nil {
			continue // it has ended, or another user runs it
		}
		for _, d := range descriptors {
			inode, ok := inodeOf(filepath.Join(dir, d.Name()))
			if _, known := found[inode]; !ok || known || !inodes[inode] {
				continue
			}
			name, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "comm"))
			if err != nil {
				break // it has ended
			}
			found[inode] = Process{pid, strings.TrimSpace(string(name))}
		}
	}
	return found, nil
}

// inodeOf returns the inode of the socket behind a descriptor.
func inodeOf(descriptor string) (uint32, bool) {
	target, err := os.Readlink(descriptor)
	if err != nil {
		return 0, false
	}
	text, ok := strings.CutPrefix(target, "socket:[")
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 32)
	return uint32(inode), err == nil
}
