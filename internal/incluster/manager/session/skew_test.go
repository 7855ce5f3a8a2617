package session

import (
	"encoding/json"
	"testing"

	"kubevpn/internal/api"

	"kubevpn/internal/incluster/manager/managertest"
)

// The first lines of laptops of other minor versions, which docs/how-to/upgrade.md allows. TestNeighboursWork of
// internal/repotest runs these tests also with a manager of the next protocol. A release that raises api.Protocol adds
// the lines of the last version before.
func TestLaptopOfNeighbouringMinorVersionIsServed(t *testing.T) {
	for name, test := range map[string]struct {
		line     string
		protocol int // at most; 0: rejected
	}{
		"first":              {`{"protocol":3,"version":"0.0.9","client":"laptop","namespace":"default","scheduler":"rr"}`, 3},
		"this":               {`{"protocol":3,"oldestProtocol":3,"version":"0.1.0","client":"laptop","scheduler":"rr"}`, 3},
		"of the next number": {`{"protocol":4,"oldestProtocol":3,"version":"0.2.0","features":["x"],"later":{"field":true}}`, 4},
		"two numbers ahead":  {`{"protocol":9,"oldestProtocol":8,"version":"9.0.0","client":"laptop"}`, 0},
		"of that alone":      {`{"protocol":9,"version":"9.0.0","client":"laptop"}`, 0},
		"of the past":        {`{"protocol":2,"version":"0.0.1","client":"laptop"}`, 0},
		"of no number":       {`{"protocol":1,"oldestProtocol":3,"version":"0.0.1","client":"laptop"}`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, testConfig{PodName: "tm-1"})
			m := managertest.Hello(t, r.laptop, json.RawMessage(test.line)).Next()
			if test.protocol == 0 {
				if m.Error == nil || m.Error.Code != api.ExitIncompatible || m.Error.Hint == "" {
					t.Errorf("got %+v", m)
				}
				return
			}
			if m.Hello == nil || m.Hello.Protocol != min(test.protocol, api.Protocol) || m.Hello.Pod != "tm-1" {
				t.Errorf("got %+v", m)
			}
		})
	}
}
