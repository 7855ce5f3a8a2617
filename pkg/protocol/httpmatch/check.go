package httpmatch

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// Schemes of a Check, besides "http". The latter is a connection that closes without a byte.
const CheckHTTPS, CheckConnect = "https", "connect"

// Check is how the kubelet checks a port of the pod, by the pod's spec. It is JSON in the agent's environment.
type Check struct {
	Scheme string      `json:"scheme"`
	Port   uint16      `json:"port"`
	URI    string      `json:"uri,omitempty"`
	Header http.Header `json:"header,omitempty"` // that the spec sets, without Host
}

// Sends reports whether the check sends this request to dst. The kubelet follows redirects on the same host. If the
// spec sets no User-Agent, Sends is false: the kubelet's own shows the request.
func (c *Check) Sends(r *http.Request, dst netip.AddrPort) bool {
	if c.Header["User-Agent"] == nil || r.Method != http.MethodGet ||
		r.RequestURI != c.URI && !strings.HasPrefix(r.Referer(), c.Scheme+"://"+dst.String()+"/") {
		return false
	}
	for name, values := range c.Header {
		if got := r.Header[name]; !slices.Equal(got, values) && (got != nil || values[0] != "") { // empty: not sent
			return false
		}
	}
	return true
}
