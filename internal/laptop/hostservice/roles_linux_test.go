package hostservice_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/helper"
	"kubevpn/internal/laptop/helper/helpertest"
	"kubevpn/internal/laptop/hostservice"
)

// roleVariable names a role that this binary runs on the machine, in place of the tests.
const roleVariable = "KUBEVPN_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role == "hold" {
		if err := hold(context.Background()); err != nil {
			e := api.AsError(err)
			fmt.Printf("error: %s; %s\n", e.Message, strings.ReplaceAll(e.Hint, "\n", " "))
		}
		return
	}
	os.Exit(m.Run())
}

// open starts a helper by the service. It finds no sudo.
func open(ctx context.Context) (*helper.Client, error) {
	path := os.Getenv("PATH")
	os.Setenv("PATH", "/nowhere")
	defer os.Setenv("PATH", path)
	socket, err := helper.Start(ctx, helper.StartConfig{Service: hostservice.Socket, Executable: "/nowhere"})
	if err != nil {
		return nil, err
	}
	return helper.NewClient(socket, nil)
}

// hold is a daemon with one link, until its helper ends. DEVICE, ADDRESS, ROUTE and LISTEN describe the state.
func hold(ctx context.Context) error {
	c, err := open(ctx)
	if err != nil {
		return err
	}
	name := os.Getenv("DEVICE")
	f, err := c.CreateTUN(ctx, name, 1400)
	if err != nil {
		return err
	}
	defer f.Close()
	link := api.Link{Name: name, MTU: 1400, MatchDomains: []string{"cluster.local"}}
	for s := range strings.FieldsSeq(os.Getenv("ADDRESS")) {
		link.Addrs = append(link.Addrs, netip.MustParsePrefix(s))
	}
	link.Routes = []netip.Prefix{netip.MustParsePrefix(os.Getenv("ROUTE"))}
	link.Named = link.Routes // the user allows it
	link.Resolver = link.Addrs[0].Addr().Next()
	listen, _ := netip.ParseAddrPort(os.Getenv("LISTEN"))
	applied, err := c.Apply(ctx, api.NetworkState{Links: []api.Link{link}, Resolver: &api.Resolver{Listen4: listen}})
	if err != nil {
		return err
	}
	fmt.Printf("up: %s, by %s, process %d\n", applied.ResolverMode, c.Starter(), os.Getpid())
	<-c.Done()
	fmt.Println("the helper has ended")
	return nil
}

// TestContractOfUser runs on the machine, as one of its users.
func TestContractOfUser(t *testing.T) {
	if os.Getenv(roleVariable) != "contract" {
		return
	}
	helpertest.Test(t, func(t *testing.T) helpertest.Helper {
		c, err := open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c
	})
}
