package access

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
)

// maxResolvConf is the most that is read of a resolv.conf, in bytes.
const maxResolvConf = 64 << 10

// ResolvConf is the resolv.conf of a pod: the kubelet or the container runtime has written it.
type ResolvConf struct {
	Servers         []netip.Addr
	Search, Options []string // options as they are, such as "ndots:5"
}

// ReadResolvConf reads the resolv.conf at path.
func ReadResolvConf(path string) (ResolvConf, error) {
	f, err := os.Open(path)
	if err != nil {
		return ResolvConf{}, err
	}
	defer f.Close()
	c, err := parseResolvConf(io.LimitReader(f, maxResolvConf))
	if err != nil {
		return ResolvConf{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return c, nil
}

// parseResolvConf follows resolv.conf(5): the last search list counts, and all options do.
func parseResolvConf(r io.Reader) (c ResolvConf, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if end := slices.IndexFunc(words, func(w string) bool { return w[0] == '#' || w[0] == ';' }); end >= 0 {
			words = words[:end]
		}
		if len(words) < 2 {
			continue
		}
		switch words[0] {
		case "nameserver":
			if addr, err := netip.ParseAddr(words[1]); err == nil {
				c.Servers = append(c.Servers, addr.Unmap())
			}
		case "search", "domain":
			c.Search = words[1:]
		case "options":
			c.Options = append(c.Options, words[1:]...)
		}
	}
	return c, lines.Err()
}

// Domain returns the cluster's domain, such as "cluster.local", from the search list, which the kubelet sets to
// "NAMESPACE.svc.DOMAIN svc.DOMAIN DOMAIN". Without such a list it is empty: the pod uses the node's DNS, which does
// not resolve names of the cluster.
func (c ResolvConf) Domain(namespace string) string {
	for _, prefix := range []string{namespace + ".svc.", "svc."} {
		for _, s := range c.Search {
			domain, ok := strings.CutPrefix(strings.ToLower(strings.Trim(s, ".")), prefix)
			if domain = strings.Trim(domain, "."); ok && domain != "" {
				return domain
			}
		}
	}
	return ""
}
