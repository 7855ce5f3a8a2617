//go:build e2e && linux

package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// mcpSuite is an assistant with the client of the protocol's own SDK, over standard input and output.
func mcpSuite(t *testing.T, w *world) {
	s := w.newShop(t, "mcp-shop", "privileged")
	l := w.newUser(t, lab.Admin)
	l.connect(t)
	l.startApp(t, "laptop")
	v := w.visitor(t)
	// The endpoints of the Service follow its pods a moment later.
	testenv.Eventually(t, soon, func() error {
		if r := l.sh(t, "curl -fsS -o /dev/null --max-time 5 http://shop.mcp-shop/"); r.code != 0 {
			return errors.New(r.stderr)
		}
		return nil
	})

	looks := l.assistant(t)
	for name, tt := range map[string]struct {
		args map[string]any
		want string
	}{
		"status": {nil, l.connection(t).ID},
		"list":   {map[string]any{"namespace": "mcp-shop"}, "deployment/shop"},
		"why":    {map[string]any{"url": "http://shop.mcp-shop/", "header": []string{"x-user: me"}}, `"status": 200`},
		"doctor": {nil, `"findings"`},
		"flows":  {map[string]any{"limit": 5}, `"items"`},
		"dns":    {nil, `"items"`},
		"logs":   {map[string]any{"tail": 20}, "level=INFO"},
	} {
		if code, text := call(t, looks, name, tt.args); code || !strings.Contains(text, tt.want) {
			t.Errorf("%s: %s", name, text)
		}
	}
	if failed, text := call(t, looks, "requests", map[string]any{"workload": s.workload, "namespace": s.namespace}); !failed || !strings.Contains(text, "not intercepted") {
		t.Error(text)
	}
	if r, err := looks.CallTool(t.Context(), &mcp.CallToolParams{Name: "proxy", Arguments: map[string]any{"workload": s.workload, "namespace": s.namespace}}); err == nil && !r.IsError {
		t.Error("an assistant that may only look intercepts requests")
	}

	changes := l.assistant(t, "--allow-changes", "--context", w.Config().Name, "--namespace", "mcp-shop", "--for", "10m")
	if failed, text := call(t, changes, "proxy", map[string]any{"workload": "deployment/web", "namespace": "default"}); !failed || !strings.Contains(text, "only") {
		t.Error(text)
	}
	args := map[string]any{"workload": s.workload, "namespace": s.namespace, "headers": []string{mine + "=" + me}, "port": []string{"8080:8080"}}
	if failed, text := call(t, changes, "proxy", args); failed {
		t.Error(text)
	}
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+ip+":8080/", "laptop", mine, me) }); err != nil {
		t.Error(err)
	}
	args = map[string]any{"workload": s.workload, "namespace": s.namespace, "isolate": true, "command": []string{"printenv", "HOSTNAME"}}
	if failed, text := call(t, changes, "dev", args); failed || !strings.Contains(text, "exit code 0") {
		t.Error(text)
	}
	if failed, text := call(t, changes, "leave", map[string]any{"workload": s.workload, "namespace": s.namespace}); failed {
		t.Error(text)
	}
	if now := l.status(t).Intercepts; len(now) != 0 {
		t.Errorf("%+v", now)
	}
}

// assistant starts `kubevpn mcp` and connects to it.
func (l *laptop) assistant(t *testing.T, args ...string) *mcp.ClientSession {
	t.Helper()
	cmd := l.command(t.Context(), t, append([]string{"kubevpn", "mcp"}, args...)...)
	c, err := mcp.NewClient(&mcp.Implementation{Name: "e2e"}, nil).Connect(t.Context(), &mcp.CommandTransport{Command: cmd}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // the process has ended with the test's context
	return c
}

// call calls a tool, and returns whether it failed, and the text of its result.
func call(t *testing.T, c *mcp.ClientSession, name string, args map[string]any) (failed bool, text string) {
	t.Helper()
	r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, part := range r.Content {
		text += part.(*mcp.TextContent).Text
	}
	return r.IsError, text
}
