//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
)

func TestOverlapNamesTheOwner(t *testing.T) {
	now := time.Date(2026, 3, 2, 14, 2, 59, 0, time.UTC)
	everything, err := httpmatch.New(httpmatch.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	both := []api.AgentPort{{Protocol: "tcp", Port: 80}, {Protocol: "udp", Port: 53}, {Protocol: "tcp", Port: 443}}
	for _, test := range []struct {
		name  string
		ports []api.AgentPort
		since time.Time
		want  string
	}{
		{"alice@laptop", both[:1], now, "alice@laptop has intercepted everything on port 80 since 14:02 UTC"},
		{"alice@laptop", both[1:2], now.Add(-11 * time.Hour), "alice@laptop has intercepted everything on UDP port 53 since 03:02 UTC"},
		{"alice@laptop", both[:2], now.Add(-24 * time.Hour), "alice@laptop has intercepted everything on ports 80 and 53/udp since 1 March, 14:02 UTC"},
		{"", both, now.In(time.FixedZone("", 3600)), "another laptop has intercepted everything on ports 80, 53/udp and 443 since 14:02 UTC"},
	} {
		first := &claim{owner: &owner{name: test.name}, match: everything, ports: test.ports, since: test.since}
		second := &claim{owner: &owner{}, match: everything, ports: both, since: now}
		if got := conflict(second, first, second.overlaps(first)); got.Message != test.want || got.Code != api.ExitConflict {
			t.Errorf("got %q (%d), want %q", got.Message, got.Code, test.want)
		}
	}
}

func TestParseListenRejectsInvalidValues(t *testing.T) {
	for text, want := range map[string]string{
		"8080:18080":     "{tcp 8080 18080}",
		"tcp/8080:18080": "{tcp 8080 18080}",
		"udp/53:15353":   "{udp 53 15353}",
		"8080":           "not PORT:LISTEN",
		"8080:8080":      "the same",
		"0:1":            `"0" is not a port`,
		"1:65536":        `"65536" is not a port`,
		"sctp/1:2":       `"sctp" is not tcp or udp`,
		"":               "not PORT:LISTEN",
	} {
		l, err := parseListen(text)
		got := fmt.Sprint(l)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) || err == nil != strings.HasPrefix(want, "{") {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestAddrsRejectInvalidAddresses(t *testing.T) {
	got, err := podIPs("10.0.0.9, fd00::9,::ffff:10.0.0.10")
	want := []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9"), netip.MustParseAddr("10.0.0.10")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"10.0.0.9,x", ""} {
		if got, err := podIPs(text); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// The error of a claim says what the kernel lacks. A sidecar's claims do not need redirects.
func TestClaimFailsWhenTheKernelCannotRedirect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice, func(c *Config) {
			c.kernel = func() (kernel, error) { return nil, errors.New("no nf_tables") }
		})
		m := p.connect(alice)
		err := m.claim("1")
		want(t, err, api.ExitInject, "no nf_tables")
		if e := api.AsError(err); !strings.Contains(e.Hint, "sidecar") {
			t.Errorf("the hint is %q", e.Hint)
		}
		o := claimOrder("1")
		o.Ports[0].Listen = 18080
		if err := m.order(api.AgentOrder{Claim: o}); err != nil {
			t.Fatal(err)
		}
		if got := askOn(t.Context(), t, p.incoming[18080]); got != "alice@laptop" {
			t.Errorf("%s answers", got)
		}
	})
}

// An agent reports that another program has bound the socket and does not answer, and continues to try.
func TestSocketOfAnotherProgramIsReported(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: abstract unix sockets need Linux")
	}
	name := fmt.Sprintf("@kubevpn-test-%d", os.Getpid())
	other, err := listenAgents(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	refusing := make(chan struct{})
	go func() {
		defer close(refusing)
		for {
			conn, err := other.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	alice := newPerson(t, "alice@laptop")
	g := newInfos()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	a := New(Config{Owner: alice.hash, OwnerName: alice.name, Socket: name, Output: g, Logger: slog.New(slog.DiscardHandler)})
	a.cfg.kernel = func() (kernel, error) { return nil, errors.ErrUnsupported }
	go func() { ended <- a.Run(ctx) }()
	if said := g.next(t); said.Error == nil || said.Error.Code != api.ExitInject || !strings.Contains(said.Error.Message, "another agent") {
		t.Errorf("said %+v", said)
	}
	other.Close()
	<-refusing
	if said := g.next(t); said.Error != nil {
		t.Errorf("said %+v", said)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
