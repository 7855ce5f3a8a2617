package connect

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
)

// asProxy makes a connection that only serves a proxy, and keeps it until Ctrl-C.
func (o *connectOptions) asProxy(ctx context.Context, on func(api.Event), quiet func()) error {
	for _, name := range []string{"netstack", "allow-inbound"} {
		if o.flags.Changed(name) {
			return api.Errorf(api.ExitUsage, "--%s cannot be combined with --socks", name).
				WithHint("a proxy has no device for packets; remove --%s", name)
		}
	}
	l, err := listenProxy(o.socks) // before the login, which may ask the user
	if err != nil {
		return err
	}
	defer l.Close()
	o.flags.Here = true
	req, err := o.flags.Request(ctx, on)
	if err != nil {
		return err
	}
	return o.flags.Consenting(&req, o.output, quiet).Run(ctx, on, func(on func(api.Event)) error {
		return o.held(on, func(on func(api.Event)) error { return proxied(ctx, o.f, req, l, on) })
	})
}

// proxied holds a connection for a proxy, without the settings of the configuration file that require a device.
func proxied(ctx context.Context, f *command.Factory, req api.ConnectRequest, l net.Listener,
	on func(api.Event)) error {
	req.Netstack, req.AllowInbound = "", nil
	return f.Hold(ctx, api.InterceptRequest{Connect: req}, nil, l, on)
}

// listenProxy listens at the address of --socks.
func listenProxy(text string) (net.Listener, error) {
	at, err := proxyAddress(text)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "--socks: cannot listen on %s: %w", at, err).
			WithHint("use another port, or port 0 for a free one")
	}
	return l, nil
}

// proxyAddress returns the address of --socks, which must be a loopback address: the protocols are not encrypted.
func proxyAddress(text string) (netip.AddrPort, error) {
	const hint = "use a loopback address and a port, such as 127.0.0.1:1080"
	at, err := netip.ParseAddrPort(text)
	if err != nil {
		return at, api.Errorf(api.ExitUsage, "--socks: %q is not IP:PORT", text).WithHint(hint)
	}
	if !at.Addr().IsLoopback() {
		return at, api.Errorf(api.ExitUsage, "--socks: %s is not a loopback address: other machines could read the "+
			"password and the traffic", at.Addr()).WithHint(hint)
	}
	return at, nil
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
