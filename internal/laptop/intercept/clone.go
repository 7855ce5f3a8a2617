package intercept

import (
	"net/netip"
	"slices"

	"kubevpn/internal/api"
)

// SetClone sets the ready pods of the clone, which receive the requests if Config.Clone is set. While there are none,
// the application receives them.
func (i *Intercept) SetClone(pods []netip.Addr) {
	pods = slices.SortedFunc(slices.Values(pods), netip.Addr.Compare)
	if now := i.target.Load(); now == nil || slices.Equal(now.Addresses, pods) {
		return
	}
	i.log.Info("the clone's pods", "ready", pods)
	i.target.Update(func(now **api.ClonePods) { *now = &api.ClonePods{Addresses: pods} })
}
