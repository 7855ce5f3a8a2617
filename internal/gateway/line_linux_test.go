package gateway

import (
	"bytes"
	"testing"

	"kubevpn/internal/api"
)

// FuzzLine reads lines of an untrusted traffic manager. check must accept only private networks, each large enough for
// the device and a laptop.
func FuzzLine(f *testing.F) {
	for _, seed := range []string{
		`{"networks":["198.19.0.0/24","fd00:1::/64"]}` + "\n" + `{"networks":[]}` + "\n",
		`{"networks":["0.0.0.0/0"]}`, `{"networks":["10.0.0.0/32","10.0.0.1/24"]}`, `{"networks":["::ffff:10.0.0.0/104"]}`,
		`{"networks":["8.8.8.0/24"]}`, `{"networks":[""]}`, "null\n", "\n",
	} {
		f.Add([]byte(seed))
	}
	f.Add(bytes.Repeat([]byte("["), maxLine+1))
	f.Fuzz(func(t *testing.T, said []byte) {
		lines := api.NewLines(bytes.NewReader(said), maxLine)
		for {
			networks, err := next(lines)
			if networks == nil {
				return
			}
			if err != nil {
				t.Fatalf("networks %v with an error: %v", networks, err)
			}
			if check(networks.Networks) != nil {
				continue
			}
			for _, p := range networks.Networks {
				if a := p.Addr(); !a.IsPrivate() && a.Is6() || p.Bits() < 7 || !p.Contains(first(p)) || first(p) == a {
					t.Errorf("check accepts %v, where the device gets %v", p, first(p))
				}
			}
		}
	})
}
