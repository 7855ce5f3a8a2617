package workload

import (
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/term"
)

func TestParsePortAcceptsNumbersAndNames(t *testing.T) {
	tests := []struct {
		port, portmap string // the same in the order of --port and of --portmap
		want          api.PortMap
		err           string
	}{
		{port: "3000:8080", portmap: "8080:3000", want: api.PortMap{Protocol: "tcp", Container: 8080, Local: 3000}},
		{port: "8080", portmap: "8080", want: api.PortMap{Protocol: "tcp", Container: 8080, Local: 8080}},
		{port: "udp/5353:53", portmap: "udp/53:5353", want: api.PortMap{Protocol: "udp", Container: 53, Local: 5353}},
		{port: "TCP/65535:1", portmap: "TCP/1:65535", want: api.PortMap{Protocol: "tcp", Container: 1, Local: 65535}},
		{port: "3000:http", portmap: "http:3000", want: api.PortMap{Protocol: "tcp", Name: "http", Local: 3000}},
		{port: "udp/dns-1", portmap: "udp/dns-1", want: api.PortMap{Protocol: "udp", Name: "dns-1"}},
		{port: "8080=172.17.0.5:3000", want: api.PortMap{Protocol: "tcp", Container: 8080, Local: 3000, Host: "172.17.0.5"}},
		{port: "http=[fd00::5]:80", want: api.PortMap{Protocol: "tcp", Name: "http", Local: 80, Host: "fd00::5"}},
		{port: "udp/53=vm.internal:5353", want: api.PortMap{Protocol: "udp", Container: 53, Local: 5353, Host: "vm.internal"}},
		{port: "8080=localhost:3000", want: api.PortMap{Protocol: "tcp", Container: 8080, Local: 3000, Host: "localhost"}},
		{port: "8080=[fe80::1%eth0]:3000", want: api.PortMap{Protocol: "tcp", Container: 8080, Local: 3000, Host: "fe80::1%eth0"}},
		{port: "8080=172.17.0.5", err: `"172.17.0.5" is not HOST:PORT`},
		{port: "8080=fd00::5:80", err: `"fd00::5:80" is not HOST:PORT`},
		{port: "8080=172.17.0.5:0", err: `"0" is not a local port`},
		{port: "8080=:80", err: `":80" is not HOST:PORT`},
		{port: "=172.17.0.5:80", err: `"" is not a container port`},
		{port: "172.17.0.5:80=8080", err: `"8080" is not HOST:PORT`},
		{port: "", portmap: "", err: `"" is not a container port`},
		{port: "1:0", portmap: "0:1", err: `"0" is not a container port`},
		{port: "1:65536", portmap: "65536:1", err: `"65536" is not a container port`},
		{port: "1:-1", portmap: "-1:1", err: `"-1" is not a container port`},
		{port: "1:Http", portmap: "Http:1", err: `"Http" is not a container port`},
		{port: ":80", portmap: "80:", err: `"" is not a local port`},
		{port: "0:80", portmap: "80:0", err: `"0" is not a local port`},
		{port: "web:80", portmap: "80:web", err: `"web" is not a local port`},
		{port: "1:2:80", portmap: "2:80:1", err: `is not a`},
		{port: "sctp/80:80", portmap: "sctp/80:80", err: `"sctp" is neither tcp nor udp`},
	}
	for _, tt := range tests {
		t.Run(strings.NewReplacer("/", "_", ":", "_").Replace(tt.port), func(t *testing.T) {
			for text, parse := range map[string]func(string) (api.PortMap, error){tt.port: parsePort, tt.portmap: parsePortMap} {
				if text == "" && tt.port != "" { // --portmap has no such form
					continue
				}
				got, err := parse(text)
				if tt.err != "" {
					if err == nil || !strings.Contains(err.Error(), tt.err) {
						t.Errorf("%q: error = %v, want %s", text, err, tt.err)
					}
					continue
				}
				if err != nil || got != tt.want {
					t.Errorf("%q: got %+v, %v, want %+v", text, got, err, tt.want)
				}
			}
		})
	}
}

func FuzzParsePort(f *testing.F) {
	f.Add("udp/5353:53")
	f.Add("http")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := parsePort(text)
		if err != nil {
			return
		}
		if p.Protocol != "tcp" && p.Protocol != "udp" || (p.Container == 0) == (p.Name == "") || p.Container > 0 && p.Local == 0 {
			t.Errorf("%q is %+v", text, p)
		}
	})
}

func TestStatusShowsPortsLikeFlag(t *testing.T) {
	want := []string{"3000:8080", "9090", "udp/5353:53", "udp/53", "8080=172.17.0.5:8080", "udp/53=[fd00::5]:53"}
	for _, text := range want {
		p, err := parsePort(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := term.PortMap(p); got != text {
			t.Errorf("%q is shown as %q", text, got)
		}
	}
}
