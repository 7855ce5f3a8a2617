package connection

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
)

func TestStartControlRequiresAHello(t *testing.T) {
	for _, tt := range []struct {
		name, answer string
		code         api.ExitCode // 0: no error
		message      string
	}{
		{"hello", `{"hello":{"protocol":3,"version":"2","pod":"m-1","state":{"resolvesVIPs":true,"sessions":1}}}`, 0, ""},
		{"refused", `{"error":{"code":15,"message":"protocol 1 is not spoken here"}}`, api.ExitIncompatible, "protocol 1 is not spoken here"},
		{"another_protocol", `{"hello":{"protocol":7,"version":"9","pod":"m-1"}}`, api.ExitIncompatible, "the traffic manager (9) speaks protocol 7, this kubevpn (t) speaks 3"},
		{"no_greeting", `{"state":{}}`, api.ExitIncompatible, "the traffic manager's first message is not a hello"},
		{"not_json", `<html>`, api.ExitUnexpected, "reading the traffic manager's hello: invalid character '<' looking for beginning of value"},
		{"nothing", ``, api.ExitUnexpected, "reading the traffic manager's hello: EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			laptop, manager := net.Pipe()
			defer laptop.Close()
			go func() {
				defer manager.Close()
				var hello api.ClientHello
				if err := json.NewDecoder(manager).Decode(&hello); err != nil || hello.Client != "me" {
					t.Errorf("hello %+v, %v", hello, err)
				}
				if _, err := io.WriteString(manager, tt.answer); err != nil && tt.answer != "" {
					t.Error(err)
				}
			}()
			_, hello, err := startControl(laptop, api.ClientHello{Protocol: api.Protocol, Version: "t", Client: "me"}, nil)
			if tt.code == 0 {
				if err != nil || hello.Pod != "m-1" {
					t.Fatalf("%+v, %v", hello, err)
				}
				return
			}
			if e := api.AsError(err); e == nil || e.Code != tt.code || e.Message != tt.message {
				t.Errorf("got %+v, want code %d: %s", e, tt.code, tt.message)
			}
		})
	}
}

func TestFollowReturnsMessagesInOrder(t *testing.T) {
	laptop, manager := net.Pipe()
	c := &control{api.NewLines(laptop, maxMessage)}
	go func() {
		defer manager.Close()
		io.WriteString(manager, `{"names":{"reset":true,"add":{"default":["web"]}}}`+"\n"+`{"state":{"resolvesVIPs":true,"sessions":2}}`)
	}()
	var got []string
	err := c.follow(t.Context(), func(m api.ControlMessage) {
		switch {
		case m.Names != nil:
			got = append(got, "names")
		case m.State != nil:
			got = append(got, "state")
		}
	})
	if want := "following the traffic manager: unexpected EOF"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if d := cmp.Diff([]string{"names", "state"}, got); d != "" {
		t.Error(d)
	}
}

func TestProbeErrorNamesFailedChecks(t *testing.T) {
	ok := func(what string) api.Check { return api.Check{What: what, Target: what + "-target", OK: true} }
	bad := func(what string) api.Check { return api.Check{What: what, Target: what + "-target", Seen: "no answer"} }
	for _, tt := range []struct {
		name    string
		checks  []api.Check
		vips    bool
		message string
		hint    string // contained
	}{
		{"passed", []api.Check{ok("name"), ok("pod"), ok("clusterIP")}, true, "", ""},
		{"nothing", []api.Check{ok("name"), bad("pod"), bad("clusterIP")}, true,
			"the tunnel is up but does not reach the cluster: pod pod-target: no answer; clusterIP clusterIP-target: no answer", "NetworkPolicy"},
		{"dialed_vips", []api.Check{ok("name"), ok("pod"), bad("clusterIP")}, false,
			"the tunnel is up but does not reach the cluster: clusterIP clusterIP-target: no answer", "Ask an admin to run `kubevpn install`"},
		{"names", []api.Check{bad("name"), ok("pod"), ok("clusterIP")}, true,
			"the tunnel is up but does not reach the cluster: name name-target: no answer", "by way of nftables"},
		{"pod", []api.Check{ok("name"), bad("pod"), ok("clusterIP")}, true,
			"the tunnel is up but does not reach the cluster: pod pod-target: no answer", "A NetworkPolicy may refuse"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := api.AsError(probeError(tt.checks, api.ResolverNFTables, tt.vips))
			if tt.message == "" {
				if e != nil {
					t.Fatal(e)
				}
				return
			}
			if e == nil || e.Code != api.ExitProbe || e.Message != tt.message || !strings.Contains(e.Hint, tt.hint) {
				t.Errorf("got %+v", e)
			}
		})
	}
}

func TestCheckTCPDistinguishesRefusals(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	open := netip.MustParseAddrPort(l.Addr().String())
	p := prober{dial: new(net.Dialer).DialContext}
	if c := p.checkTCP(t.Context(), "clusterIP", open); !c.OK || !strings.HasPrefix(c.Seen, "connected in ") {
		t.Errorf("%+v", c)
	}
	l.Close()
	for what, want := range map[string]bool{"pod": true, "clusterIP": false} {
		if c := p.checkTCP(t.Context(), what, open); c.OK != want || c.Seen != "connection refused" {
			t.Errorf("a %s that refuses: %+v", what, c)
		}
	}
	if c := p.checkTCP(t.Context(), "pod", netip.AddrPort{}); !c.OK || c.Seen != "not tried: no running pod with a TCP port is visible" {
		t.Errorf("%+v", c)
	}
}

func TestCheckTCPTriesOtherSourcePorts(t *testing.T) {
	for _, pass := range []int{4, 5} { // the attempt that gets an answer
		synctest.Test(t, func(t *testing.T) {
			dials := 0
			p := prober{dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
				if dials++; dials == 2 { // net's timer may fire before that of the context
					return nil, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}
				}
				if dials < pass {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				conn, _ := net.Pipe()
				return conn, nil
			}}
			ctx, cancel := context.WithTimeout(t.Context(), probeTimeout)
			defer cancel()
			c := p.checkTCP(ctx, "pod", netip.MustParseAddrPort("10.0.0.1:53"))
			if want := pass == 4; c.OK != want || dials != 4 || !want && c.Seen != "no answer" {
				t.Errorf("after %d attempts: %+v", dials, c)
			}
		})
	}
}

func TestNamesFollowUserAndManager(t *testing.T) {
	n := newNames()
	n.apply(fromUser, api.NameDelta{Reset: true, Add: map[string][]string{"default": {"web"}, "dev": {"db"}}})
	if d := cmp.Diff([]string{"default"}, n.matchable()); d != "" {
		t.Errorf("a namespace that is called like a top-level domain (-want +got):\n%s", d)
	}
	n.apply(fromUser, api.NameDelta{Add: map[string][]string{"corp": {"git"}, "lan": {"nas"}, "internal": {"vault"}, "local": {"tv"}}})
	if d := cmp.Diff([]string{"default"}, n.matchable()); d != "" {
		t.Errorf("a namespace that is called like a private top-level domain (-want +got):\n%s", d)
	}
	n.apply(fromManager, api.NameDelta{Reset: true, Add: map[string][]string{"default": {"web", "api"}, "shop": {"cart"}}})
	n.apply(fromUser, api.NameDelta{Reset: true}) // comes too late to count
	n.apply(fromManager, api.NameDelta{Remove: map[string][]string{"shop": {"cart"}, "default": {"api"}}})
	if d := cmp.Diff([]string{"default"}, n.matchable()); d != "" {
		t.Errorf("after the deltas (-want +got):\n%s", d)
	}
	for _, tt := range []struct {
		namespace, service string
		want               bool
	}{{"default", "web", true}, {"default", "api", false}, {"shop", "cart", false}, {"dev", "db", false}} {
		if got := n.index.Has(tt.namespace, tt.service); got != tt.want {
			t.Errorf("Has(%s, %s) = %v", tt.namespace, tt.service, got)
		}
	}
}

func TestAsleepTellsOfEachJumpOfTheWallClock(t *testing.T) {
	wall := time.Unix(1_700_000_000, 0)
	for name, tt := range map[string]struct{ passed, want time.Duration }{
		"a tick":              {wakeTick, 0},
		"an hour of sleep":    {time.Hour + wakeTick, time.Hour},
		"the clock goes back": {-time.Minute, -time.Minute - wakeTick},
	} {
		if d := asleep(wall, wall.Add(tt.passed)); d != tt.want {
			t.Errorf("%s counts as %v of sleep", name, d)
		}
	}
	before := time.Now() // has a monotonic reading, which goes on while the process is stopped
	if d := asleep(before, before.Add(time.Minute)); d != time.Minute-wakeTick {
		t.Errorf("a minute in which the process was stopped counts as %v of sleep", d)
	}
}

func TestWatchWakeIgnoresOrdinaryTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := watchWake(ctx, func(slept time.Duration) { t.Errorf("slept %v", slept) })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

func TestCurrentWaitsForASession(t *testing.T) {
	c := new(current)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.wait(ctx); err != context.Canceled {
		t.Errorf("got %v", err)
	}
	got := make(chan *transport.Session)
	go func() {
		s, err := c.wait(t.Context())
		if err != nil {
			t.Error(err)
		}
		got <- s
	}()
	s := new(transport.Session)
	c.set(s)
	if <-got != s {
		t.Error("wait returned another session")
	}
	c.clear(new(transport.Session)) // an older one
	if c.now() != s {
		t.Error("clearing another session cleared this one")
	}
	if c.clear(s); c.now() != nil {
		t.Error("the session is still there")
	}
}
