package connection

import (
	"net/netip"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/host/route"
)

// Foresee plans the routes of a connection to a cluster with these networks, as far as the user may see them without a
// traffic manager. It uses the networks of the request. path contains the addresses that stay outside of the tunnel,
// devices the tunnels of connections to the same cluster, and inPod says that this machine is a pod of the cluster. It
// changes nothing. own contains the tunnels of all connections of this user.
func Foresee(found client.CIDRs, r api.ConnectRequest, path []netip.Addr, devices, own []string,
	inPod bool) (api.Foresight, error) {
	p, err := plan(networks{
		Cluster: slices.Concat(found.Pods, found.Services), Extra: r.ExtraCIDRs, Exclude: r.ExcludeCIDRs, Path: path,
		Consent: r.Consent.Networks, InPod: inPod, NoMap: r.NoMap, Map: r.Map,
		Overlaps: func(p []netip.Prefix) ([]route.Overlap, error) { return route.Overlaps(p, devices) },
		Foreign:  func(link string) bool { return isForeign(link, own) },
	})
	if err != nil {
		return api.Foresight{}, err
	}
	out := api.Foresight{Routes: p.Routes, Mappings: p.Mappings, Warnings: p.Warnings}
	if len(p.Overlaps) > 0 {
		out.Overlap = overlapError(p.Overlaps)
	}
	return out, nil
}
