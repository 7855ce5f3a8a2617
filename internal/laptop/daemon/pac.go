package daemon

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
)

// pac returns a proxy auto-configuration file: browsers use the proxy for names and networks of the cluster only. It is
// called when there is a link.
// https://developer.mozilla.org/docs/Web/HTTP/Guides/Proxy_servers_and_tunneling/Proxy_Auto-Configuration_PAC_file
func (p *proxy) pac() []byte {
	link := p.link.Load()
	domains, networks := []string{}, [][2]string{}
	for _, d := range link.MatchDomains {
		if !strings.HasSuffix(d, ".arpa") {
			domains = append(domains, d)
		}
	}
	for _, r := range link.Routes {
		if r.Addr().Is4() { // PAC has no portable function for IPv6
			networks = append(networks, [2]string{r.Addr().String(), net.IP(net.CIDRMask(r.Bits(), 32)).String()})
		}
	}
	text := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err) // strings always encode
		}
		return string(b)
	}
	return fmt.Appendf(nil, pacText, text(domains), text(networks), text("PROXY "+p.listener.Addr().String()))
}

// pacText is a format with the domains, the networks and the proxy. Browsers cannot send a password to a SOCKS5 proxy,
// so it names the HTTP proxy.
const pacText = `function FindProxyForURL(url, host) {
  var domains = %s, networks = %s, proxy = %s;
  host = host.toLowerCase();
  if (host == "localhost" || host.indexOf(":") >= 0) return "DIRECT";
  if (/^[0-9]+(\.[0-9]+){3}$/.test(host)) {
    for (var i = 0; i < networks.length; i++)
      if (isInNet(host, networks[i][0], networks[i][1])) return proxy;
    return "DIRECT";
  }
  if (host.indexOf(".") < 0) return proxy;
  for (var i = 0; i < domains.length; i++)
    if (host == domains[i] || host.slice(-domains[i].length - 1) == "." + domains[i]) return proxy;
  return "DIRECT";
}
`
