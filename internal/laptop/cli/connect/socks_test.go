package connect

import (
	"strings"
	"testing"

	"kubevpn/internal/api"
)

func TestConnectedNamesTheProxy(t *testing.T) {
	var b strings.Builder
	printConnected(&b, &api.Connection{ID: "id", Cluster: "lab", Namespace: "shop",
		DNS:   api.DNSStatus{Mode: api.ResolverProxy, Domain: "cluster.local"},
		SOCKS: &api.SOCKS{Address: "[::1]:1080", User: "kubevpn", Password: "XYZ", PAC: "http://[::1]:1080/S.pac"}})
	const want = `Connected to lab, namespace shop (id)
  networks  none through the proxy
  names     NAME, NAME.NAMESPACE and *.cluster.local, by the proxy
  proxy     socks5h://kubevpn:XYZ@[::1]:1080
  proxy     http://kubevpn:XYZ@[::1]:1080
  browsers  http://[::1]:1080/S.pac (proxy auto-configuration), user kubevpn, password XYZ
`
	if got := b.String(); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}
