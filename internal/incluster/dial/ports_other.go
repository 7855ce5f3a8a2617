//go:build !linux

package dial

import (
	"context"
	"net"
	"net/netip"
)

// ports leaves the choice to the kernel: the manager runs on Linux, and elsewhere only in tests.
type ports struct{}

func newPorts() *ports { return &ports{} }

func (*ports) connect(ctx context.Context, d net.Dialer, dst netip.AddrPort) (net.Conn, error) {
	return d.DialContext(ctx, "tcp", dst.String())
}
