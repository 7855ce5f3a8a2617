package connect

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpguts"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/pkg/protocol/httpmatch"
)

// listen listens at the address of --socks, if the other flags need no device.
func (o *connectOptions) listen() (net.Listener, error) {
	for _, name := range []string{"netstack", "allow-inbound"} {
		if o.flags.Changed(name) {
			return nil, api.Errorf(api.ExitUsage, "--%s cannot be combined with --socks", name).
				WithHint("a proxy has no device for packets; remove --%s", name)
		}
	}
	return command.ListenProxy(o.socks)
}

// added returns the headers of --add-header.
func (o *connectOptions) added() (headers []httpmatch.Named, err error) {
	if len(o.headers) > 0 && o.socks == "" {
		return nil, api.Errorf(api.ExitUsage, "--add-header requires --socks").
			WithHint("only a proxy can change requests: add --socks 127.0.0.1:1080")
	}
	for _, text := range o.headers {
		name, value, _ := strings.Cut(text, "=")
		h := httpmatch.Named{Name: name, Value: value}
		if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) || value == "" {
			return nil, api.Errorf(api.ExitUsage, "--add-header: %q is not NAME=VALUE", text).
				WithHint("write it like --add-header x-user=me or --add-header baggage=user=me")
		}
		switch name = http.CanonicalHeaderKey(name); name {
		case "Host", "Connection", "Content-Length", "Transfer-Encoding", "Upgrade":
			return nil, api.Errorf(api.ExitUsage, "--add-header: %s says how a request travels", name).
				WithHint("add the header that the match of the intercept needs")
		}
		headers = append(headers, h)
	}
	return headers, nil
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
