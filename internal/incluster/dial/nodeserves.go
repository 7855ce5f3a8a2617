package dial

import (
	"context"
	"net"
	"net/netip"
	"time"

	"kubevpn/internal/api"
)

// nodeServesTimeout limits the dial of a ClusterIP. The kernel repeats a lost SYN after a second, and after three.
const nodeServesTimeout = 3200 * time.Millisecond

// NodeServes dials a ClusterIP as any program in the pod does. Its result (ManagerState.NodeServes) proves whether the
// node serves ClusterIPs, and IPVS, which makes a ClusterIP an address of the node. It is empty if vip is invalid.
func NodeServes(ctx context.Context, vip netip.AddrPort) string {
	if !vip.IsValid() {
		return ""
	}
	dialing, cancel := context.WithTimeout(ctx, nodeServesTimeout)
	defer cancel()
	var to net.Dialer
	conn, err := to.DialContext(dialing, "tcp", vip.String())
	if err != nil {
		return api.NodeServesNothing
	}
	conn.Close()
	if endsAtNextHop(vip.Addr()) {
		return api.NodeServesAsAddress
	}
	return api.NodeServesClusterIP
}
