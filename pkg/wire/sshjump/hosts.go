package sshjump

import (
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
)

// Host is one jump host.
type Host struct {
	User string // empty: ssh chooses
	Name string // a host name, an IP address, or a Host of the user's SSH configuration
	Port uint16 // 0: ssh chooses
}

// Hosts are jump hosts, in the order in which ssh goes through them.
type Hosts []Host

// ssh inserts users and names into a command for a shell if a host has a ProxyCommand or a jump host.
var (
	validUser = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.@+-]*$`)
	validName = regexp.MustCompile(`^[A-Za-z0-9_:][A-Za-z0-9_.:-]*$`)
)

// Parse parses [user@]host[:port], or several, separated by commas, as in ssh's option -J. An IPv6 address needs
// brackets. An empty text has no hosts.
func Parse(text string) (Hosts, error) {
	if text == "" {
		return nil, nil
	}
	var hosts Hosts
	for part := range strings.SplitSeq(text, ",") {
		h, ok := parse(strings.TrimPrefix(part, "ssh://"))
		if !ok {
			return nil, fmt.Errorf("%q is not a jump host; write it like dev@bastion.example.com:22", part)
		}
		hosts = append(hosts, h)
	}
	return hosts, nil
}

func parse(text string) (h Host, ok bool) {
	h.Name = text
	if at := strings.LastIndexByte(text, '@'); at >= 0 {
		h.User, h.Name = text[:at], text[at+1:]
		if !validUser.MatchString(h.User) {
			return h, false
		}
	}
	if inner, bracketed := strings.CutPrefix(h.Name, "["); bracketed && strings.HasSuffix(inner, "]") {
		h.Name = strings.TrimSuffix(inner, "]")
	} else if strings.Contains(h.Name, ":") {
		name, port, err := net.SplitHostPort(h.Name)
		n, e := strconv.ParseUint(port, 10, 16)
		if err != nil || e != nil || n == 0 {
			return h, false
		}
		h.Name, h.Port = name, uint16(n)
	}
	return h, validName.MatchString(h.Name)
}

// String returns the host as Parse accepts it.
func (h Host) String() string {
	text := h.Name
	if h.Port != 0 {
		text = net.JoinHostPort(h.Name, strconv.Itoa(int(h.Port)))
	} else if strings.Contains(text, ":") {
		text = "[" + text + "]"
	}
	if h.User != "" {
		text = h.User + "@" + text
	}
	return text
}

// String returns the hosts as Parse accepts them.
func (h Hosts) String() string {
	all := make([]string, len(h))
	for i, host := range h {
		all[i] = host.String()
	}
	return strings.Join(all, ",")
}

// Arguments returns the arguments of ssh that log in to the last host. There must be one.
func (h Hosts) Arguments() (args []string) {
	last := len(h) - 1
	if last > 0 {
		args = append(args, "-J", h[:last].String())
	}
	if p := h[last].Port; p != 0 {
		args = append(args, "-p", strconv.Itoa(int(p)))
	}
	if u := h[last].User; u != "" {
		args = append(args, "-l", u)
	}
	return append(args, "--", h[last].Name)
}
