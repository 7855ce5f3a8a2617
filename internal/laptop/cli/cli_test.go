package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/testenv"
)

func TestEveryCommandHasExamples(t *testing.T) {
	var check func(cmd *cobra.Command)
	check = func(cmd *cobra.Command) {
		if cmd.Hidden {
			return
		}
		if cmd.Example == "" || cmd.Short == "" {
			t.Errorf("`%s` lacks an example or a short text", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			if strings.TrimSpace(line) != "" && !strings.HasPrefix(line, "  ") {
				t.Errorf("`%s`: the example's line %q is not indented", cmd.CommandPath(), line)
			}
		}
		for _, sub := range cmd.Commands() {
			check(sub)
		}
	}
	check(newRoot(&command.Factory{}, false))
}

func TestStatusPrintsTables(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	status := api.Status{Connections: []api.Connection{
		{
			ID: "3f2a91c04b7e", Cluster: "lab", Namespace: "shop", Status: api.StatusConnected, Netstack: "gvisor",
			NetstackReason: "ClusterIPs are served by IPVS", ProxyMode: "ipvs", Transport: "port-forward (spdy)", Since: now.Add(-90 * time.Minute), Device: "kubevpn0",
			Addresses: []netip.Addr{netip.MustParseAddr("198.19.0.1")}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			DNS: api.DNSStatus{Mode: api.ResolverResolved}, Services: "resolved by kubevpn",
			ManagerNamespace: "kubevpn", ManagerPod: "m-1", ManagerVersion: "1.2.3",
			AllowInbound: []api.Inbound{{Port: 8080}, {Port: 53, UDP: true}},
			Transports: []api.Transport{
				{Name: "port-forward", State: api.TransportInUse, Seconds: 0.0012, Sent: 1500000, Received: 20},
				{Name: "api-proxy", State: api.TransportFailing, Reason: "you may not create pods/proxy"},
			},
		},
		{ID: "000000000000", Status: api.StatusFailed, Error: api.Errorf(api.ExitLost, "the root helper ended").WithHint("one\ntwo")},
	}}
	tests := []struct{ format, want string }{
		{"table", `ID            CLUSTER  NAMESPACE  STATUS     NETSTACK  TRANSPORT            SINCE
3f2a91c04b7e  lab      shop       connected  gvisor    port-forward (spdy)  90m
000000000000  -        -          failed     -         -                    -

000000000000
  Error: the root helper ended
    one
    two
`},
		{"wide", `ID            CLUSTER  NAMESPACE  STATUS     NETSTACK  TRANSPORT            SINCE  DEVICE    ADDRESSES   NETWORKS    DNS               SERVICES             MANAGER
3f2a91c04b7e  lab      shop       connected  gvisor    port-forward (spdy)  90m    kubevpn0  198.19.0.1  10.0.0.0/8  systemd-resolved  resolved by kubevpn  kubevpn/m-1 (1.2.3)
000000000000  -        -          failed     -         -                    -      -         -           -           -                 -                    -

3f2a91c04b7e
  netstack gvisor: ClusterIPs are served by IPVS
  port-forward in use: round trip 1.2 ms, 1.5 MB sent, 20 B received
  api-proxy failing (you may not create pods/proxy)
  kube-proxy ipvs
  other laptops may connect to 8080, 53/udp

000000000000
  Error: the root helper ended
    one
    two
`},
	}
	for _, tt := range tests {
		t.Run(tt.format, func(t *testing.T) {
			o := &statusOptions{output: term.NewFormat("table", "wide", "json", "yaml")}
			if err := o.output.Set(tt.format); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			if err := o.print(&out, status, now); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestTailStartsAtTheLastLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	long := strings.Repeat("x", 10000)
	if err := os.WriteFile(path, []byte("one\n"+long+"\nthree\nno end"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		tail int
		want string
	}{
		{-1, "one\n" + long + "\nthree\nno end"},
		{0, "no end"},
		{1, "three\nno end"},
		{2, long + "\nthree\nno end"},
		{3, "one\n" + long + "\nthree\nno end"},
		{9, "one\n" + long + "\nthree\nno end"},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.tail), func(t *testing.T) {
			l := &tailer{path: path}
			defer l.close()
			var out bytes.Buffer
			if err := errors.Join(l.open(tt.tail), l.copy(&out)); err != nil {
				t.Fatal(err)
			}
			if out.String() != tt.want {
				t.Errorf("tail = %.40q..., want %.40q...", out.String(), tt.want)
			}
		})
	}
}

func TestFollowContinuesAfterRotation(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kubevpn", "daemon.log")
	f := &command.Factory{Streams: term.Streams{Out: &testenv.Buffer{}, Errout: &testenv.Buffer{}}, Lookup: func(name string) (string, bool) {
		return map[string]string{"XDG_STATE_HOME": dir, "HOME": dir}[name], true
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- (&logsOptions{f: f, follow: true, tail: -1}).run(ctx) }()
	seen := func(text string) func() bool {
		return func() bool { return f.Out.(*testenv.Buffer).String() == text }
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	appendTo := func(path, text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		must(err)
		_, err = f.WriteString(text)
		must(errors.Join(err, f.Close()))
	}
	must(os.MkdirAll(filepath.Dir(path), 0o700)) // following began before there was a log
	appendTo(path, "one\n")
	testenv.Until(t, "the first line", seen("one\n"))
	appendTo(path, "two\n")
	must(os.Rename(path, path+".1"))
	appendTo(path+".1", "three\n")
	appendTo(path, "four\n")
	testenv.Until(t, "the rest, in order", seen("one\ntwo\nthree\nfour\n"))
	cancel()
	if err := <-done; err != nil {
		t.Errorf("run = %v, want nil", err)
	}
}
