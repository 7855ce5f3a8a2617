package manager

import (
	"encoding/json"
	"testing"

	"kubevpn/internal/api"
)

// The first lines of laptops of the previous minor version and of the next one, as docs/how-to/upgrade.md allows them:
// both have protocol 3. When api.Protocol changes, the manager rejects them, and a release that changes it adds the
// lines of the last version before.
const (
	previousHello = `{"protocol":3,"version":"0.0.9","client":"laptop","namespace":"default","scheduler":"rr"}`
	nextHello     = `{"protocol":3,"version":"0.2.0","client":"laptop","namespace":"default","scheduler":"rr",` +
		`"netstack":"gvisor","later":{"field":true}}`
)

func TestLaptopOfNeighbouringMinorVersionIsServed(t *testing.T) {
	for name, line := range map[string]string{"previous": previousHello, "next": nextHello} {
		t.Run(name, func(t *testing.T) {
			r := start(t, Config{PodName: "tm-1"})
			m := hello(t, r.laptop, json.RawMessage(line)).next()
			var laptop api.ClientHello
			if err := json.Unmarshal([]byte(line), &laptop); err != nil {
				t.Fatal(err)
			}
			if laptop.Protocol != api.Protocol {
				if m.Error == nil || m.Error.Code != api.ExitIncompatible {
					t.Errorf("a laptop of protocol %d got %+v", laptop.Protocol, m)
				}
				return
			}
			if m.Hello == nil || m.Hello.Protocol != laptop.Protocol || m.Hello.Pod != "tm-1" {
				t.Errorf("got %+v", m)
			}
		})
	}
}
