//go:build linux

package agent

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
)

// The kubelet and the container runtime give an agent's container the same files as the pod's other containers.
const resolvConf, hostsFile = "/etc/resolv.conf", "/etc/hosts"

// maxHosts is the largest hosts file that is reported, in bytes.
const maxHosts = 128 << 10

// readNames reads the name resolution of the pod, without lines for the pod's own addresses. A file that does not exist
// is empty, as for the C library.
func readNames(resolv, hosts string, own []netip.Addr) (*api.PodNames, error) {
	c, err := access.ReadResolvConf(resolv)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	names := &api.PodNames{Servers: c.Servers, Search: c.Search, Options: c.Options}
	f, err := os.Open(hosts)
	if errors.Is(err, fs.ErrNotExist) {
		return names, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxHosts+1))
	if err == nil && len(text) > maxHosts {
		err = errors.New("it is too large")
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", hosts, err)
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 0 {
			if a, err := netip.ParseAddr(words[0]); err == nil && slices.Contains(own, a) {
				continue
			}
		}
		names.Hosts += line
	}
	return names, nil
}
