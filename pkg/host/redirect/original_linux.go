package redirect

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"kubevpn/pkg/host/unixsocket"

	"golang.org/x/sys/unix"
)

// OriginalDestination returns the destination of a redirected connection before the redirect. For one that was not
// redirected, and that the kernel tracks, it is the local address. It fails for connections of an MPTCP listener, which
// is Go's default: switch that off.
func OriginalDestination(c *net.TCPConn) (netip.AddrPort, error) {
	// as accepted: an IPv4 address in IPv6 for a listener of both
	local := c.LocalAddr().(*net.TCPAddr).AddrPort().Addr()
	var to netip.AddrPort
	if err := unixsocket.Control(c, func(fd int) (err error) {
		if local.Is4() || local.Is4In6() {
			to, err = original4(fd)
		} else {
			to, err = original6(fd)
		}
		return err
	}); err != nil {
		return netip.AddrPort{},
			fmt.Errorf("cannot read the original destination of the connection from %v: %w", c.RemoteAddr(), err)
	}
	return to, nil
}

// original4 reads a sockaddr_in. The type is the one of x/sys with room for it.
func original4(fd int) (netip.AddrPort, error) {
	m, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	sockaddr := m.Multiaddr // family, port, address
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(sockaddr[4:8])), binary.BigEndian.Uint16(sockaddr[2:])), nil
}

// original6 reads a sockaddr_in6. IP6T_SO_ORIGINAL_DST has IPv4's number.
func original6(fd int) (netip.AddrPort, error) {
	m, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var port [2]byte
	binary.NativeEndian.PutUint16(port[:], m.Addr.Port) // which is in network order
	return netip.AddrPortFrom(netip.AddrFrom16(m.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}
