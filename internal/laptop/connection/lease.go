package connection

import (
	"context"
	"time"

	"kubevpn/internal/kube/install"
)

const (
	lastRenewal = 2 * time.Second // for the last renewal of a lease
	leaseRetry  = 5 * time.Second // after a renewal that failed
)

// keepLease renews the lease of the temporary traffic manager until ctx ends. It installs a manager again if Kubernetes
// has deleted this one because this machine slept or had no network.
func (c *Connection) keepLease(ctx context.Context) error {
	for wait := install.LeaseEvery; ; {
		select {
		case <-ctx.Done():
			return c.leaveLease(ctx)
		case <-c.Moved():
		case <-c.lost: // perhaps with the manager
		case <-time.After(wait):
		}
		l := c.manager.location.Load().lease
		if l == (install.Lease{}) {
			return nil // it stays now
		}
		lives, err := l.Renew(ctx, c.cluster, install.LeaseTime)
		if err == nil && !lives {
			c.log.Warn("the traffic manager's lease has ended: installing it again")
			err = c.manager.ensure(ctx)
		}
		wait = install.LeaseEvery
		if err != nil && ctx.Err() == nil {
			wait = leaseRetry
			c.log.Warn("cannot keep the temporary traffic manager; trying again", "err", err)
		}
	}
}

// leaveLease lets the manager end soon, unless other laptops renew its lease.
func (c *Connection) leaveLease(ctx context.Context) error {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastRenewal)
	defer cancel()
	if _, err := c.manager.location.Load().lease.Renew(last, c.cluster, install.LeaseEnd); err != nil {
		c.log.Warn("cannot shorten the traffic manager's lease", "it ends in", install.LeaseTime, "err", err)
	}
	return ctx.Err()
}
