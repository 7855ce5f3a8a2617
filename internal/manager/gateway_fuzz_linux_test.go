package manager

import (
	"bytes"
	"encoding/json"
	"testing"

	"kubevpn/internal/api"
)

// FuzzGatewayLine reads any line of a gateway. The manager sends its contents to laptops, so they must encode as JSON.
func FuzzGatewayLine(f *testing.F) {
	for _, seed := range []string{
		`{"mtu":1500,"addrs":["198.19.0.1","fd00::1"],"ipv4":true,"ipv6":false,"backend":"nft","warnings":["no IPv6"]}` + "\n" + `{"mtu":9000,"addrs":null}` + "\n",
		`{"mtu":-1,"addrs":[""]}`, `{"mtu":1e99}`, `{"addrs":["1.2.3.4%eth0"]}`, "null\n\n", `{"warnings":[null,"` + "\xff\x1b[2J" + `"]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Add(bytes.Repeat([]byte("["), maxGatewayLine+1))
	f.Fuzz(func(t *testing.T, said []byte) {
		lines := api.NewLines(bytes.NewReader(said), maxGatewayLine)
		for {
			about, err := nextGateway(lines)
			if err != nil {
				return
			}
			if _, err := json.Marshal(about); err != nil {
				t.Errorf("%+v does not encode as JSON: %v", about, err)
			}
		}
	})
}
