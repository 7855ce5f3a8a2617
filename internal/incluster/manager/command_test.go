package manager

import (
	"errors"
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
	for address, want := range map[string]string{
		":10800": "--listen", "0.0.0.0:10800": "--listen", "[::]:10800": "--listen", "10.0.0.1:10800": "--listen",
		"[::ffff:10.0.0.1]:10800": "--listen", "localhost:10800": "--listen", "": "--listen",
		// These get as far as the next check.
		"127.0.0.1:10800": "--pod-ip", "[::1]:10800": "--pod-ip",
	} {
		cmd := NewCommand()
		cmd.SetArgs([]string{"--listen", address, "--pod-ip", "wrong"})
		var e *api.Error
		if err := cmd.ExecuteContext(t.Context()); !errors.As(err, &e) || e.Code != api.ExitUsage ||
			!strings.HasPrefix(e.Message, want) {
			t.Errorf("%q: %v", address, err)
		}
	}
}
