package watch

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
)

// DNS describes cluster DNS as the kubelet configures it in the pod's resolv.conf.
type DNS struct {
	Servers []netip.Addr
	Domain  string // "cluster.local"; empty when the pod does not use cluster DNS
}

// ReadResolvConf reads the resolv.conf of a pod in a namespace.
func ReadResolvConf(path, namespace string) (DNS, error) {
	f, err := os.Open(path)
	if err != nil {
		return DNS{}, err
	}
	defer f.Close()
	c, err := parseResolvConf(f, namespace)
	if err != nil {
		return DNS{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return c, nil
}

// parseResolvConf returns the nameservers, and the domain from the search list, which the kubelet sets to
// "NAMESPACE.svc.DOMAIN svc.DOMAIN DOMAIN". Without such a list the pod uses the node's DNS, which does not resolve
// names of the cluster; the result is then empty.
func parseResolvConf(r io.Reader, namespace string) (DNS, error) {
	var c DNS
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 2 {
			continue
		}
		switch words[0] {
		case "nameserver":
			if addr, err := netip.ParseAddr(words[1]); err == nil {
				c.Servers = append(c.Servers, addr.Unmap())
			}
		case "search": // the last one counts, as in resolv.conf(5)
			c.Domain = clusterDomain(words[1:], namespace)
		}
	}
	if err := lines.Err(); err != nil {
		return DNS{}, err
	}
	if c.Domain == "" {
		c.Servers = nil
	}
	return c, nil
}

func clusterDomain(search []string, namespace string) string {
	for _, prefix := range []string{namespace + ".svc.", "svc."} {
		for _, s := range search {
			domain, ok := strings.CutPrefix(strings.ToLower(strings.Trim(s, ".")), prefix)
			if domain = strings.Trim(domain, "."); ok && domain != "" {
				return domain
			}
		}
	}
	return ""
}
