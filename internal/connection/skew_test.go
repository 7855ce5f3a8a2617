package connection

import (
	"encoding/json"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// The answers of managers of the previous minor version and of the next one, which docs/how-to/upgrade.md allows.
const (
	previousManager = `{"hello":{"protocol":3,"version":"0.0.9","pod":"tm-1","lease":{},"state":{"resolvesVIPs":true,"sessions":1}}}`
	// A manager of a later protocol answers with the one of the session.
	nextManager  = `{"hello":{"protocol":3,"version":"0.2.0","pod":"tm-1","lease":{"later":1},"state":{"resolvesVIPs":true,"sessions":1},"later":true}}`
	otherManager = `{"hello":{"protocol":9,"version":"9.0.0","pod":"tm-1","lease":{},"state":{}}}`
)

func TestManagerOfNeighbouringMinorVersionIsUsed(t *testing.T) {
	for name, line := range map[string]string{"previous": previousManager, "next": nextManager, "other": otherManager} {
		t.Run(name, func(t *testing.T) {
			_, hello, err := startControl(conversation{strings.NewReader(line + "\n")}, api.ClientHello{Protocol: api.Protocol})
			var said api.ControlMessage
			if err := json.Unmarshal([]byte(line), &said); err != nil {
				t.Fatal(err)
			}
			if name == "other" {
				if api.AsError(err) == nil || api.AsError(err).Code != api.ExitIncompatible {
					t.Errorf("a manager of protocol %d: %v", said.Hello.Protocol, err)
				}
				return
			}
			if err != nil || hello.Pod != "tm-1" || !hello.State.ResolvesVIPs {
				t.Errorf("got %+v, %v", hello, err)
			}
		})
	}
}
