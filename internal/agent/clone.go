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

	"kubevpn/pkg/interceptor"
)

// cloneTimeout bounds a connection to one pod of a clone.
const cloneTimeout = 3 * time.Second

// clone gives flows to the pods of a clone, by turns. It is away when its laptop is, whose lease it lives by, or has no pod. It
// is an interceptor.Taker.
//
//	request ─▶ agent ─▶ pod of the clone, at the port that it was for
//	             ▲
//	             └── laptop: says which pods, and is there
type clone struct {
	laptop taker
	pods   []netip.Addr
	turn   atomic.Uint32
	dialer net.Dialer
}

func newClone(laptop taker, pods []netip.Addr) *clone {
	return &clone{laptop: laptop, pods: slices.Clone(pods), dialer: net.Dialer{Timeout: cloneTimeout}}
}

// Away reports whether requests have to go to the application.
func (c *clone) Away() bool { return len(c.pods) == 0 || c.laptop.Away() }

// Dial connects to the pod whose turn it is, or to one after it that answers.
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
	return nil, fmt.Errorf("connecting to the clone: %w", errors.Join(errs...))
}
