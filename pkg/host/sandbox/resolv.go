package sandbox

import (
	"os"
	"strings"
)

// resolvConf is the content of /etc/resolv.conf.
func (n *Network) resolvConf() string {
	var b strings.Builder
	line := func(words ...string) { b.WriteString(strings.Join(words, " ") + "\n") }
	for _, a := range n.DNS {
		line("nameserver", a.String())
	}
	if len(n.Search) > 0 {
		line(append([]string{"search"}, n.Search...)...)
	}
	if len(n.Options) > 0 {
		line(append([]string{"options"}, n.Options...)...)
	}
	return b.String()
}

// hostsFile is the content of /etc/hosts, with a line for the host name of this process; "": as it is.
func (n *Network) hostsFile() string {
	if n.Hosts == "" {
		return ""
	}
	own := strings.TrimSuffix(n.Hosts, "\n") + "\n"
	if name, err := os.Hostname(); err == nil {
		for _, p := range n.Addresses {
			own += p.Addr().String() + "\t" + name + "\n"
		}
	}
	return own
}

// hostsByDNS returns the nsswitch.conf conf with its hosts line replaced: hosts are looked up in /etc/hosts and DNS
// only.
func hostsByDNS(conf string) string {
	const hosts = "hosts: files dns"
	var out []string
	done := false
	for line := range strings.Lines(conf) {
		line = strings.TrimSuffix(line, "\n")
		database, _, found := strings.Cut(line, ":")
		if !found || strings.TrimSpace(database) != "hosts" {
			out = append(out, line)
			continue
		}
		if !done {
			out, done = append(out, hosts), true
		}
	}
	if !done {
		out = append(out, hosts)
	}
	return strings.Join(out, "\n") + "\n"
}
