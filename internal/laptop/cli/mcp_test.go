package cli

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

// assistant connects a client of the protocol to a server.
func assistant(t *testing.T, s *mcpServer) *mcp.ClientSession {
	t.Helper()
	home := t.TempDir()
	s.f = &command.Factory{
		Streams: term.Streams{In: strings.NewReader(""), Out: io.Discard, Errout: io.Discard},
		Lookup: func(name string) (string, bool) {
			if name == "HOME" {
				return home, true
			}
			return "", false
		},
		Log: slog.New(slog.DiscardHandler),
	}
	s.run = func(ctx context.Context, args []string, out, messages io.Writer) int {
		f := *s.f
		f.Streams = term.Streams{In: strings.NewReader(""), Out: &term.Cleaner{W: out}, Errout: &term.Cleaner{W: messages}}
		return run(ctx, &f, false, args)
	}
	near, far := mcp.NewInMemoryTransports()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.server().Run(ctx, far) }()
	client, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(ctx, near, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		client.Close()
		cancel()
		<-ended
	})
	return client
}

func text(r *mcp.CallToolResult) string {
	var b strings.Builder
	for _, c := range r.Content {
		b.WriteString(c.(*mcp.TextContent).Text)
	}
	return b.String()
}

func TestAssistantSeesWhatTheUserSees(t *testing.T) {
	c := assistant(t, &mcpServer{})
	list, err := c.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
		if !tool.Annotations.ReadOnlyHint || tool.Description == "" {
			t.Errorf("%+v", tool)
		}
	}
	slices.Sort(names)
	if got, want := strings.Join(names, " "), "dns doctor flows list logs requests status why"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "status"})
	if err != nil || r.IsError || !strings.HasPrefix(text(r), dataNotice) || !strings.Contains(text(r), `"connections": []`) {
		t.Errorf("%v, %s", err, text(r))
	}
	r, err = c.CallTool(t.Context(), &mcp.CallToolParams{Name: "why", Arguments: map[string]any{"url": "http://web/"}})
	if err != nil || !r.IsError || !strings.Contains(text(r), "exit code 10\nError: no kubeconfig") {
		t.Errorf("%v, %s", err, text(r))
	}
	for _, bad := range []*mcp.CallToolParams{
		{Name: "proxy", Arguments: map[string]any{"workload": "deployment/web", "namespace": "shop"}},
		{Name: "why", Arguments: map[string]any{"url": "http://web/", "from": "deployment/web"}},
		{Name: "why"},
	} {
		if r, err := c.CallTool(t.Context(), bad); err == nil && !r.IsError {
			t.Errorf("%+v: %s", bad, text(r))
		}
	}
	if r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "why", Arguments: map[string]any{"url": "--from=deployment/web"}}); err != nil || !strings.Contains(text(r), "is no url") {
		t.Errorf("%v, %s", err, text(r))
	}
}

func TestAssistantChangesOnlyWhatIsAllowed(t *testing.T) {
	s := &mcpServer{context: "east", namespaces: []string{"shop"}, until: time.Now().Add(time.Hour)}
	c := assistant(t, s)
	for _, tt := range []struct{ namespace, want string }{
		{"other", `changes are allowed in the namespaces ["shop"] only`},
		{"shop", "exit code"},
	} {
		r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "leave", Arguments: map[string]any{"workload": "deployment/web", "namespace": tt.namespace}})
		if err != nil || !r.IsError || !strings.Contains(text(r), tt.want) {
			t.Errorf("%s: %v, %s", tt.namespace, err, text(r))
		}
	}
	s.until = time.Now().Add(-time.Second)
	r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "connect", Arguments: map[string]any{"namespace": "shop"}})
	if err != nil || !strings.Contains(text(r), "the time for changes is over") {
		t.Errorf("%v, %s", err, text(r))
	}
}

// Nothing that an assistant says becomes another flag, and each argument is one of the command.
func TestToolsRunTheirCommands(t *testing.T) {
	root := newRoot(&command.Factory{Log: slog.New(slog.DiscardHandler)}, false)
	for _, tool := range tools() {
		cmd, rest, err := root.Find([]string{tool.command})
		if err != nil || len(rest) > 0 {
			t.Fatal(tool.command, err)
		}
		for _, name := range tool.flags {
			if cmd.Flag(name) == nil {
				t.Errorf("%s has no flag %s", tool.command, name)
			}
		}
		tool.schema(cmd)
	}
	proxy := tools()[slices.IndexFunc(tools(), func(t tool) bool { return t.command == "dev" })]
	args, err := proxy.arguments(map[string]any{"workload": "deployment/web", "namespace": "shop --yes", "headers": []any{"x-user=me", "--yes"},
		"proxy": true, "command": []any{"printenv", "--yes"}, "yes": true, "context": "production"}, "east")
	if want := []string{"dev", "--context=east", "--headers=x-user=me", "--headers=--yes", "--namespace=shop --yes", "--proxy=true", "deployment/web", "--", "printenv", "--yes"}; err != nil || !slices.Equal(args, want) {
		t.Errorf("%q, %v, want %q", args, err, want)
	}
}

func TestLongResultsAreCut(t *testing.T) {
	var l limited
	for range 3 {
		if n, err := l.Write(make([]byte, maxResult)); n != maxResult || err != nil {
			t.Fatal(n, err)
		}
	}
	if got := l.String(); len(got) > maxResult+100 || !strings.HasSuffix(got, "(524288 bytes more)\n") {
		t.Errorf("%d bytes", len(got))
	}
}
