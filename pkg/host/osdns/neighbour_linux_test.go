package osdns

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

// neighbourRole is another host on a link of this machine. It knows the address of the tunnel's link, and tries for a
// while to connect to it.
func neighbourRole() int {
	_, _ = io.Copy(io.Discard, os.Stdin) // the link exists when the input ends
	for _, c := range []string{
		"ip link set lan1 up",
		"ip addr add 192.0.2.130/25 dev lan1",
		"ip addr add 2001:db8:1::2/64 dev lan1 nodad",
		"ip route add 198.19.0.0/16 via 192.0.2.129",
		"ip route add fd00:198::/64 via 2001:db8:1::1",
	} {
		f := strings.Fields(c)
		if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %s\n", c, out)
			return 2
		}
	}
	within, err := time.ParseDuration(os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	conn, err := net.DialTimeout("tcp", os.Args[1], within)
	if err != nil {
		return 1
	}
	conn.Close()
	return 0
}
