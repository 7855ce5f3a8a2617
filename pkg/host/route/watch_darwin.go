package route

import "golang.org/x/sys/unix"

// openNotices returns a socket for the kernel's messages about links, addresses and routes: route(4).
func openNotices() (int, error) {
	fd, err := unix.Socket(unix.AF_ROUTE, unix.SOCK_RAW, unix.AF_UNSPEC)
	if err != nil {
		return 0, err
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// isChange reports whether a message is about a change. Its fourth byte is its type, see struct rt_msghdr. The kernel
// sends an RTM_MISS for each packet without a route, and repeats the questions of other programs.
func isChange(message []byte) bool {
	return len(message) > 3 && message[3] != unix.RTM_MISS && message[3] != unix.RTM_GET
}
