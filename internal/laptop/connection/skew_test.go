package connection

import (
	"context"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
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
			_, hello, err := startControl(conversation{strings.NewReader(line + "\n")}, api.ClientHello{Protocol: api.Protocol}, nil)
			if name == "other" {
				if api.AsError(err) == nil || api.AsError(err).Code != api.ExitIncompatible {
					t.Errorf("a manager of another protocol: %v", err)
				}
				return
			}
			if err != nil || hello.Pod != "tm-1" || !hello.State.ResolvesVIPs {
				t.Errorf("got %+v, %v", hello, err)
			}
		})
	}
}

// TestNeighboursWork of internal/repotest runs this in builds of two protocol versions.
func TestLaptopGreetsManagerOfAnotherBuild(t *testing.T) {
	addr := os.Getenv("KUBEVPN_TEST_GREETS")
	if addr == "" {
		t.Skip("TestNeighboursWork of internal/repotest runs it") // so it is not skipped
	}
	want, err := strconv.Atoi(os.Getenv("KUBEVPN_TEST_PROTOCOL"))
	if err != nil {
		t.Fatal(err)
	}
	dial := func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", addr) }
	var got *api.ManagerHello
	err = greet(t.Context(), transport.ClientConfig{Dial: dial},
		func(_ context.Context, _ *transport.Session, _ *control, hello *api.ManagerHello) { got = hello })
	if err != nil || got == nil || got.Protocol != want {
		t.Errorf("got %+v, %v, want protocol %d", got, err, want)
	}
}
