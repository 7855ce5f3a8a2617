package manager

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

func TestCommandRejectsWrongNamespaces(t *testing.T) {
	for _, flag := range []string{"--watch-namespaces", "--allow-namespaces"} {
		for _, wrong := range []string{"shop,,tools", "Shop", "shop/web", "*"} {
			rejects(t, flag, flag, wrong)
		}
	}
	rejects(t, `--watch-namespaces lacks "shop"`, "--watch-namespaces", "tools", "--allow-namespaces", "tools,shop")
}

// rejects checks that the manager does not start with args, and that the error says why.
func rejects(t *testing.T, why string, args ...string) {
	t.Helper()
	cmd := NewCommand()
	cmd.SetArgs(args)
	var e *api.Error
	if err := cmd.ExecuteContext(t.Context()); !errors.As(err, &e) || e.Code != api.ExitUsage || !strings.Contains(e.Message, why) {
		t.Errorf("%q: %v", args, err)
	}
}

// A limit with a typing error must not be no limit.
func TestCommandRejectsWrongNetworks(t *testing.T) {
	for _, flag := range []string{"--allow-cidr", "--deny-cidr"} {
		for _, wrong := range []string{"10.0.0.0", "10.0.0.1/8", "10.0.0.0/33", "nodes", "::ffff:10.0.0.0/104", "10.0.0.0/8,,"} {
			cmd := NewCommand()
			cmd.SetArgs([]string{flag, wrong})
			var e *api.Error
			if err := cmd.ExecuteContext(t.Context()); !errors.As(err, &e) || e.Code != api.ExitUsage || !strings.Contains(e.Message, flag) {
				t.Errorf("%s %q: %v", flag, wrong, err)
			}
		}
	}
}

// Whoever reaches the address may use the manager.
func TestManagerListensOnLoopbackOnly(t *testing.T) {
	if at, err := netip.ParseAddrPort(sessionsAddress); err != nil || !at.Addr().IsLoopback() {
		t.Errorf("sessions are for %v, %v", at, err)
	}
	if NewCommand().Flags().Lookup("listen") != nil {
		t.Error("a flag changes the address")
	}
}
