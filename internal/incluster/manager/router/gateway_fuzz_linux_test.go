package router

import (
	"encoding/json"
	"testing"

	"kubevpn/internal/api"
)

// FuzzGatewayMessage reads any message of a gateway. The manager sends its contents to laptops, so they must encode as
// JSON.
func FuzzGatewayMessage(f *testing.F) {
	for _, seed := range []string{
		`{"mtu":1500,"addrs":["198.19.0.1","fd00::1"],"ipv4":true,"ipv6":false,"backend":"nft","warnings":["no IPv6"]}`,
		`{"mtu":9000,"addrs":null}`, `{"mtu":-1,"addrs":[""]}`, `{"mtu":1e99}`, `{"addrs":["1.2.3.4%eth0"]}`, "null",
		`{"warnings":[null,"` + "\xff\x1b[2J" + `"]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		var about api.Gateway
		if json.Unmarshal(said, &about) != nil {
			return
		}
		if _, err := json.Marshal(about); err != nil {
			t.Errorf("%+v does not encode as JSON: %v", about, err)
		}
	})
}
