//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"kubevpn/pkg/protocol/interceptor"
)

// cloneTimeout bounds a connection to one pod of a clone.
const cloneTimeout = 3 * time.Second

// clone sends requests to the pods of a clone in turn. It implements interceptor.Target. It is away when it has no
// pods, or when its laptop, which renews the clone's lease, is away.
//
//	request ─▶ agent ─▶ pod of the clone, at the request's port
//	             ▲
//	             └── laptop: names the pods, and renews the lease
type clone struct {
	laptop laptop
	pods   []netip.Addr
	turn   atomic.Uint32
	dialer net.Dialer
}

func newClone(laptop laptop, pods []netip.Addr) *clone {
	return &clone{laptop: laptop, pods: slices.Clone(pods), dialer: net.Dialer{Timeout: cloneTimeout}}
}

// Away reports whether requests must go to the application.
func (c *clone) Away() bool { return len(c.pods) == 0 || c.laptop.Away() }

// Dial connects to the pod whose turn it is, or to the next one that answers.
func (c *clone) Dial(ctx context.Context, f interceptor.Flow) (net.Conn, error) {
	var errs []error
	first := int(c.turn.Add(1))
	for n := range c.pods {
		at := netip.AddrPortFrom(c.pods[(first+n)%len(c.pods)], f.Dst.Port())
		conn, err := c.dialer.DialContext(ctx, f.Protocol, at.String())
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, fmt.Errorf("cannot connect to the clone: %w", errors.Join(errs...))
}
