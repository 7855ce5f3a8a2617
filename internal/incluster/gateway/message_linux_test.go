package gateway

import (
	"encoding/json"
	"testing"

	"kubevpn/internal/api"
)

// FuzzMessage reads a message of an untrusted traffic manager. check must accept only private networks, each large
// enough for the device and a laptop.
func FuzzMessage(f *testing.F) {
	for _, seed := range []string{
		`{"networks":["198.19.0.0/24","fd00:1::/64"]}`, `{"networks":[]}`,
		`{"networks":["0.0.0.0/0"]}`, `{"networks":["10.0.0.0/32","10.0.0.1/24"]}`, `{"networks":["::ffff:10.0.0.0/104"]}`,
		`{"networks":["8.8.8.0/24"]}`, `{"networks":[""]}`, "null", "",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		var networks api.GatewayNetworks
		if json.Unmarshal(said, &networks) != nil || check(networks.Networks) != nil {
			return
		}
		for _, p := range networks.Networks {
			if a := p.Addr(); !a.IsPrivate() && a.Is6() || p.Bits() < 7 || !p.Contains(first(p)) || first(p) == a {
				t.Errorf("check accepts %v, where the device gets %v", p, first(p))
			}
		}
	})
}
