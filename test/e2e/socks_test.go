//go:build e2e && linux

package e2e

import (
	"net"
	"strings"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// associateScript sends a DNS query for NAME to SERVER through UDP ASSOCIATE, and prints the address in the answer.
const associateScript = `
import socket, struct, sys
host, port, user, password, server, name = sys.argv[1:]
c = socket.create_connection((host, int(port)), 20)
def read(n):
	b = b""
	while len(b) < n: b += c.recv(n - len(b))
	return b
c.sendall(b"\x05\x01\x02"); assert read(2) == b"\x05\x02"
c.sendall(b"\x01" + bytes([len(user)]) + user.encode() + bytes([len(password)]) + password.encode()); assert read(2) == b"\x01\x00"
c.sendall(b"\x05\x03\x00\x01" + bytes(6)); reply = read(10); assert reply[:4] == b"\x05\x00\x00\x01", reply
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(20)
query = b"\x12\x34\x01\x00\x00\x01" + bytes(6) + b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\x00\x00\x01\x00\x01"
header = b"\x00\x00\x00\x01" + socket.inet_aton(server) + struct.pack(">H", 53)
u.sendto(header + query, (socket.inet_ntoa(reply[4:8]), struct.unpack(">H", reply[8:])[0]))
answer = u.recv(65536)
assert answer.startswith(header + b"\x12\x34"), answer
print(socket.inet_ntoa(answer[-4:]))
`

// socksSuite checks that a user without sudo and without /dev/net/tun reaches the cluster through the proxy, that other
// users do not, and that nothing on the laptop changes.
func socksSuite(t *testing.T, w *world) {
	root := w.newLaptop(t, lab.Admin)
	before := root.snapshot(t)
	l := w.laptopOf(t, eve)
	l.within = withDevice(0)
	a := l.begin(t, "--socks", "127.0.0.1:0", "--add-header", "x-user=me")
	p := a.proxy(t)
	vip, pod := w.clusterIP(t, "default", "web"), w.pods(t, "default", "app=web")[0].String()
	outside := w.Config().Families()[0].Outside.String()

	t.Run("curl_reaches_the_cluster_and_the_outside", func(t *testing.T) {
		for _, options := range []string{"--socks5-hostname", "--proxy", "--proxytunnel --proxy"} {
			for _, address := range []string{"web", "web.default", "web.default.svc.cluster.local", vip, pod + ":8080",
				"www.outside.test", outside} {
				r := l.curl(t, p, p.User+":"+p.Password, options, "http://"+address+"/")
				want := `"host":"web-`
				if address == outside || address == "www.outside.test" {
					want = "outside: GET"
				}
				adds := options == "--proxy" && want != "outside: GET" // others carry bytes
				if r.code != 0 || !strings.Contains(r.stdout, want) || strings.Contains(r.stdout, `"X-User":["me"]`) != adds {
					t.Errorf("%s %s: %v\nwant %s, with the header: %v", options, address, r, want, adds)
				}
			}
		}
	})
	t.Run("refusal_is_told", func(t *testing.T) {
		for address, code := range map[string]string{pod + ":4444": "(5)", "nobody.default.svc": "(4)", "127.0.0.1": "(4)"} {
			r := l.curl(t, p, p.User+":"+p.Password, "--socks5-hostname", "http://"+address+"/")
			if r.code != 97 || !strings.Contains(r.stderr, code) {
				t.Errorf("%s: %v\nwant %s", address, r, code)
			}
		}
	})
	t.Run("datagrams_reach_cluster_dns", func(t *testing.T) {
		host, port, err := net.SplitHostPort(p.Address)
		if err != nil {
			t.Fatal(err)
		}
		r := l.run(t, "python3", "-c", associateScript, host, port, p.User, p.Password,
			w.clusterIP(t, "kube-system", "kube-dns"), "web.default.svc.cluster.local")
		if strings.TrimSpace(r.stdout) != vip {
			t.Errorf("%v\nwant %s", r, vip)
		}
	})
	t.Run("others_are_rejected", func(t *testing.T) {
		for _, options := range []string{"--socks5-hostname", "--proxy", "--proxytunnel --proxy"} {
			for _, user := range []string{"", p.User + ":wrong"} {
				if r := root.curl(t, p, user, options, "http://web.default/"); strings.Contains(r.stdout, `"host"`) {
					t.Errorf("%s %q: %v", options, user, r)
				}
			}
		}
		for address, want := range map[string]string{"http://" + p.Address + "/": "403", p.PAC: "200"} {
			if r := root.run(t, "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", address); r.stdout != want {
				t.Errorf("%s: %v\nwant %s", address, r, want)
			}
		}
	})
	t.Run("laptop_is_unchanged", func(t *testing.T) {
		root.sameAs(t, before)
		for _, role := range []string{theDaemon, theHelper} {
			if found := l.processes(t, role); len(found) > 0 {
				t.Errorf("a %s runs: %v", role, found)
			}
		}
	})
	if err := a.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code, last := a.end(t); code != int(api.ExitOK) {
		t.Errorf("exit %d; last event %+v\n%s", code, last, &a.stderr)
	}
	root.sameAs(t, before)
}

// proxy reads events until the connection exists, and returns its proxy.
func (a *attempt) proxy(t *testing.T) *api.SOCKS {
	t.Helper()
	for {
		var e api.Event
		if err := a.events.Decode(&e); err != nil {
			t.Fatalf("waiting for the proxy: %v\n%s", err, &a.stderr)
		}
		if e.Error != nil {
			t.Fatal(e.Error)
		}
		if e.Connection != nil && e.Connection.SOCKS != nil {
			return e.Connection.SOCKS
		}
	}
}

// curl fetches a URL through the proxy, whose address follows the options.
func (l *laptop) curl(t *testing.T, p *api.SOCKS, user, options, address string) result {
	t.Helper()
	argv := append([]string{"curl", "-sS", "--noproxy", "", "--max-time", "20", "--proxy-user", user},
		append(strings.Fields(options), p.Address, address)...)
	return l.run(t, argv...)
}
