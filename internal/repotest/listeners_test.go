package repotest

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// listeners are the places of the product that listen or make a server, by file and function, each with its rows of the
// table "Listeners" in docs/security.md, one for each call. To listen somewhere else, bound the conns, and what one may
// hold and for how long: authlistener.Bound and testenv.Flood help. Then add a row, and an entry here. Calls that are
// no listener of their own have "".
var listeners = map[string][]string{
	"internal/incluster/agent/agent.go:lead":                            {"agent: its port"},
	"internal/incluster/agent/infoserver.go:openInfoServer":             {"agent: 127.0.0.1, information"},
	"internal/incluster/agent/receiver.go:listenPackets":                {"agent: intercepted UDP ports"},
	"internal/incluster/agent/receiver.go:listenTCP":                    {"agent: intercepted TCP ports"},
	"internal/incluster/agent/socket_linux.go:listenAgents":             {"agent: @kubevpn-agent"},
	"internal/laptop/cli/command/connection.go:ListenProxy":             {"connect --socks: proxy"},
	"internal/laptop/connection/device.go:serveDNSAt":                   {"daemon: resolver", "daemon: resolver"},
	"internal/laptop/connection/outside.go:DialEcho":                    {""}, // the kernel delivers answers to its pings only
	"internal/laptop/daemon/daemon.go:serve":                            {"daemon: its sockets"},
	"internal/laptop/daemon/listen.go:listen":                           {"daemon: its sockets"},
	"internal/laptop/daemon/metrics.go:serveMetrics":                    {"daemon: metrics"},
	"internal/laptop/daemon/page.go:servePage":                          {"daemon: page"},
	"internal/laptop/daemon/resolver.go:listenBoth":                     {"daemon: resolver", "daemon: resolver"},
	"internal/laptop/dev/localhost.go:forwardLocalhost":                 {"dev --localhost: its ports"},
	"internal/laptop/docker/sockets_linux.go:listen":                    {"dev --docker: control socket"},
	"internal/incluster/gateway/gateway_linux.go:run":                   {"gateway: @kubevpn-gateway-lock"},
	"internal/incluster/manager/router/gateway_linux.go:ListenGateways": {"traffic manager: @kubevpn-gateway"},
	"internal/incluster/manager/manager.go:Run":                         managerPorts,
	"internal/process/files/command_linux.go:wait":                      {"files: @kubevpn-files-N"},
	"internal/process/metrics/serve.go:Serve":                           {"daemon: metrics"},
	"internal/laptop/page/page.go:Listen":                               {"daemon: page", "daemon: page"},
	"internal/laptop/hostservice/kubevpn-helper.plist":                  {"helper service: its socket"},
	"internal/laptop/hostservice/kubevpn-helper.socket":                 {"helper service: its socket"},
	"internal/incluster/supervisor/supervisor.go:Run":                   {"clone: socket for files"},
	"pkg/datapath/netstack/start.go:ListenTCP":                          {""}, // for internal/laptop/connection
	"pkg/host/sandbox/localhost_linux.go:newLocalhost":                  {"dev: the pod's localhost"},
	"pkg/host/redirect/transparent_linux.go:prove":                      {""}, // for one conn of this process, at most 2 s
	"pkg/protocol/interceptor/http.go:newServer":                        {"agent: intercepted TCP ports"},
	"pkg/protocol/socks/http.go:httpServer":                             {"connect --socks: proxy"},
	"pkg/protocol/socks/udp.go:associate":                               {"connect --socks: datagrams"},
}

var managerPorts = []string{"traffic manager: 127.0.0.1:10800, sessions", "traffic manager: 10801, health",
	"traffic manager: 10802, proxy port", "traffic manager: 10803, metrics"}

// TestListenersAreDocumented finds calls of Listen and the like, literals of http.Server and dns.Server, and units of
// service managers.
func TestListenersAreDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "docs/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n### Listeners\n")
	table, _, _ = strings.Cut(table, "\n#")
	found := listening(t)
	for at, n := range found {
		rows, ok := listeners[at]
		if !ok || len(rows) != n {
			t.Errorf("%s listens %d times, and has %d rows: document the listener in the table \"Listeners\" of "+
				"docs/security.md, and name the row in listeners", at, n, len(rows))
		}
		for _, row := range rows {
			if row != "" && !strings.Contains(table, "\n| "+row+" |") {
				t.Errorf("%s: docs/security.md has no row %q in the table \"Listeners\"", at, row)
			}
		}
	}
	for at := range listeners {
		if found[at] == 0 {
			t.Errorf("%s does not listen: remove it from listeners", at)
		}
	}
}

// listening returns how often each function of the product listens.
func listening(t *testing.T) map[string]int {
	t.Helper()
	found := map[string]int{}
	for _, s := range sources(t, token.NewFileSet()) {
		top, _, _ := strings.Cut(s.path, "/")
		if strings.HasSuffix(s.path, "_test.go") || !slices.Contains([]string{"cmd", "internal", "pkg"}, top) ||
			slices.Contains(outside, filepath.ToSlash(filepath.Dir(s.path))) {
			continue
		}
		for _, decl := range s.file.Decls {
			at := s.path
			if f, ok := decl.(*ast.FuncDecl); ok {
				at += ":" + f.Name.Name
			}
			if n := listens(decl); n > 0 {
				found[at] += n
			}
		}
	}
	for _, ending := range []string{"socket", "plist"} {
		units, err := filepath.Glob(filepath.Join(root(t), "internal/*/*/*."+ending))
		if err != nil {
			t.Fatal(err)
		}
		for _, unit := range units {
			path, err := filepath.Rel(root(t), unit)
			if err != nil {
				t.Fatal(err)
			}
			found[filepath.ToSlash(path)] = 1
		}
	}
	return found
}

var (
	listen  = regexp.MustCompile(`^Listen(Packet|TCP|UDP|Unix|Unixgram|MulticastUDP|IP|TLS|AndServe|AndServeTLS)?$`)
	servers = regexp.MustCompile(`^(http|dns)\.Server$`)
)

// listens returns how often code listens, or makes a server.
func listens(code ast.Node) (n int) {
	ast.Inspect(code, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.CallExpr:
			if f, ok := node.Fun.(*ast.SelectorExpr); ok && listen.MatchString(f.Sel.Name) {
				n++
			}
		case *ast.CompositeLit:
			if typ, ok := node.Type.(*ast.SelectorExpr); ok {
				if x, ok := typ.X.(*ast.Ident); ok && servers.MatchString(x.Name+"."+typ.Sel.Name) {
					n++
				}
			}
		}
		return true
	})
	return n
}
