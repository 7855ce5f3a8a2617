package manager

import (
	"errors"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

func TestCommandRejectsWrongNamespaces(t *testing.T) {
	for _, wrong := range []string{"shop,,tools", "Shop", "shop/web", "*"} {
		cmd := NewCommand()
		cmd.SetArgs([]string{"--watch-namespaces", wrong})
		var e *api.Error
		if err := cmd.ExecuteContext(t.Context()); !errors.As(err, &e) || e.Code != api.ExitUsage ||
			!strings.Contains(e.Message, "--watch-namespaces") {
			t.Errorf("%q: %v", wrong, err)
		}
	}
}
