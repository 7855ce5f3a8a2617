package route

import "golang.org/x/sys/unix"

// openNotices returns a socket for the kernel's messages about links, addresses, routes and rules: rtnetlink(7).
func openNotices() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	at := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	for _, group := range []int{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE} {
		at.Groups |= 1 << (group - 1)
	}
	if err := unix.Bind(fd, at); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// isChange reports whether a message is about a change. All messages of the groups are.
func isChange([]byte) bool { return true }
