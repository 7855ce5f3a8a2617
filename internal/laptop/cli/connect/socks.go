package connect

import (
	"fmt"
	"io"
	"net"
	"net/url"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

// listen listens at the address of --socks, if the other flags need no device.
func (o *connectOptions) listen() (net.Listener, error) {
	for _, name := range []string{"netstack", "allow-inbound"} {
		if o.flags.Changed(name) {
			return nil, api.Errorf(api.ExitUsage, "--%s cannot be combined with --socks", name).
				WithHint("a proxy has no device for packets; remove --%s", name)
		}
	}
	return listenProxy(o.socks)
}

// listenProxy listens at the address of --socks, which must be a loopback address: the protocols are not encrypted.
func listenProxy(text string) (net.Listener, error) {
	at, err := config.ParseLoopback(text, "the password and the traffic")
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "--socks: %w", err).
			WithHint("use a loopback address and a port, such as 127.0.0.1:1080")
	}
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "--socks: cannot listen on %s: %w", at, err).
			WithHint("use another port, or port 0 for a free one")
	}
	return l, nil
}

// printProxy prints what a program needs to use the proxy.
func printProxy(w io.Writer, p *api.SOCKS) {
	at := url.URL{User: url.UserPassword(p.User, p.Password), Host: p.Address}
	for _, scheme := range []string{"socks5h", "http"} {
		at.Scheme = scheme
		fmt.Fprintf(w, "  proxy     %s\n", at.String())
	}
	fmt.Fprintf(w, "  browsers  %s (proxy auto-configuration), user %s, password %s\n", p.PAC, p.User, p.Password)
}
