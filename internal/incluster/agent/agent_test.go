//go:build linux

package agent

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/transport"
)

// want fails the test unless err has the code, and its message contains text.
func want(t *testing.T, err error, code api.ExitCode, text string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Message, text) {
		t.Errorf("got %v, want code %d with %q", err, code, text)
	}
}

func TestClaimedRequestsGoToTheLaptop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		if s := m.state("at the beginning", func(*api.AgentState) bool { return true }); len(s.Claims) != 0 || s.Claims == nil {
			t.Errorf("%+v", s)
		}
		began := time.Now()
		if err := m.claim("1", "x-user=me"); err != nil {
			t.Fatal(err)
		}
		s := m.state("the claim", func(s *api.AgentState) bool { return len(s.Claims) == 1 })
		c := s.Claims[0]
		if c.ID != "1" || c.Owner != "alice@laptop" || !c.Mine || c.Away || c.Match != "x-user=me" || c.Mirror || len(c.Ports) != 1 ||
			c.Since.Before(began) || c.Since.After(time.Now()) || s.Source != "address" {
			t.Errorf("%+v of %+v", c, s)
		}
		if got := p.kernel.ports(); got != "[tcp/8080]" {
			t.Errorf("redirected: %s", got)
		}
		if got := p.ask("X-User=me"); got != "alice@laptop" {
			t.Errorf("%s answers", got)
		}
		if got := p.ask("X-User=you"); got != "application" {
			t.Errorf("%s answers a request that no claim matches", got)
		}
		m.state("a request", func(s *api.AgentState) bool { return s.Claims[0].Requests == 1 })
		if err := m.claim("1"); err != nil { // the same claim, for everything
			t.Fatal(err)
		}
		again := m.state("the other match", func(s *api.AgentState) bool { return s.Claims[0].Match != "x-user=me" }).Claims
		if len(again) != 1 || again[0].Requests != 1 || !again[0].Since.Equal(c.Since) {
			t.Errorf("replaced: %+v", again)
		}
		if got := p.ask("X-User=you"); got != "alice@laptop" {
			t.Errorf("%s answers", got)
		}
		if err := m.order(api.AgentOrder{Release: "1"}); err != nil {
			t.Fatal(err)
		}
		if got := p.ask("X-User=you"); got != "application" {
			t.Errorf("%s answers after the release", got)
		}
		if got := p.kernel.ports(); got != "[]" {
			t.Errorf("redirected: %s", got)
		}
		if err := m.order(api.AgentOrder{Release: "1"}); err != nil {
			t.Errorf("a second release: %v", err)
		}
	})
}

// The agent also reports the first request of a claim that replaced one with as many requests.
func TestRequestsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		for _, id := range []string{"1", "2"} {
			if err := m.claim(id); err != nil {
				t.Fatal(err)
			}
			pass(reportPause) // the laptop has a report of the claim without a request
			if got := p.ask(); got != "alice@laptop" {
				t.Errorf("%s answers", got)
			}
			asked := time.Now()
			m.state("a request of claim "+id, func(s *api.AgentState) bool { return s.Claims[0].ID == id && s.Claims[0].Requests == 1 })
			if took := time.Since(asked); took > reportPause {
				t.Errorf("the request was counted after %v", took)
			}
			if err := m.order(api.AgentOrder{Release: id}); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// The agent rejects invalid orders, and the session continues.
func TestOrdersAreValidated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		claim := func(change func(*api.ClaimOrder)) error {
			o := claimOrder("1")
			change(o)
			return m.order(api.AgentOrder{Claim: o})
		}
		tcp := func(numbers ...uint16) (ports []api.AgentPort) {
			for _, n := range numbers {
				ports = append(ports, api.AgentPort{Protocol: "tcp", Port: n})
			}
			return ports
		}
		for name, test := range map[string]struct {
			change func(*api.ClaimOrder)
			code   api.ExitCode
			text   string
		}{
			"no-id":       {func(o *api.ClaimOrder) { o.ID = "" }, api.ExitUsage, "ID"},
			"long-id":     {func(o *api.ClaimOrder) { o.ID = strings.Repeat("x", 129) }, api.ExitUsage, "ID"},
			"no-port":     {func(o *api.ClaimOrder) { o.Ports = nil }, api.ExitUsage, "ports"},
			"many-ports":  {func(o *api.ClaimOrder) { o.Ports = make([]api.AgentPort, 65) }, api.ExitUsage, "ports"},
			"port-zero":   {func(o *api.ClaimOrder) { o.Ports = tcp(0) }, api.ExitUsage, "tcp/0"},
			"sctp":        {func(o *api.ClaimOrder) { o.Ports[0].Protocol = "sctp" }, api.ExitUsage, "sctp/8080"},
			"twice":       {func(o *api.ClaimOrder) { o.Ports = tcp(80, 80) }, api.ExitUsage, "port 80 is named twice"},
			"own-port":    {func(o *api.ClaimOrder) { o.Ports = tcp(7) }, api.ExitConflict, "port 7 belongs to the traffic agent"},
			"expression":  {func(o *api.ClaimOrder) { o.Match.Path = "=~(" }, api.ExitUsage, "path"},
			"certificate": {func(o *api.ClaimOrder) { o.TLS = &api.TLSTermination{Key: []byte("k")} }, api.ExitUsage, "certificate"},
		} {
			if err := api.AsError(claim(test.change)); err == nil || err.Code != test.code || !strings.Contains(err.Message, test.text) {
				t.Errorf("%s: got %v, want code %d with %q", name, err, test.code, test.text)
			}
		}
		want(t, m.order(api.AgentOrder{}), api.ExitIncompatible, "0 that kubevpn")
		want(t, m.order(api.AgentOrder{Release: "1", Reset: true}), api.ExitIncompatible, "2 that kubevpn")
		want(t, m.order(api.AgentOrder{Probe: &api.Probe{Preface: []byte("short")}}), api.ExitUsage, "probe")
		if got := p.kernel.ports(); got != "[]" {
			t.Errorf("redirected: %s", got)
		}
		p.kernel.refuse = errors.New("no room")
		want(t, m.claim("1"), api.ExitInject, "no room")
		p.kernel.refuse = nil
		if err := m.claim("1"); err != nil { // after all that
			t.Fatal(err)
		}
	})
}

func TestHelloOfAnotherProtocolIsRejected(t *testing.T) {
	for name, test := range map[string]struct {
		hello any
		text  string
	}{
		"newer":   {api.AgentHello{Protocol: api.Protocol + 1, Version: "9.9"}, "this kubevpn is 9.9"},
		"newest":  {api.AgentHello{Protocol: api.Protocol + 2, Oldest: api.Protocol + 1, Version: "9.9"}, "this kubevpn is 9.9"},
		"nothing": {"what?", "hello"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				alice := newPerson(t, "alice@laptop")
				m := newPod(t, alice).attach(alice)
				m.hello(test.hello)
				r, ok := <-m.reports
				if !ok || r.Error == nil || r.Error.Code != api.ExitIncompatible || !strings.Contains(r.Error.Message, test.text) {
					t.Errorf("%+v", r)
				}
				if r, ok := <-m.reports; ok {
					t.Errorf("and then %+v", r)
				}
			})
		})
	}
}

// Laptops one protocol ahead or behind use the agent. TestNeighboursWork of internal/repotest runs this also with an
// agent of the next protocol.
func TestLaptopOfNeighbouringMinorVersionGetsTheState(t *testing.T) {
	for name, line := range map[string]string{
		"first": `{"protocol":3,"version":"0.0.9"}`,
		"this":  `{"protocol":3,"oldestProtocol":3,"version":"0.1.0"}`,
		"next":  `{"protocol":4,"oldestProtocol":3,"version":"0.2.0","features":["x"]}`,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				alice := newPerson(t, "alice@laptop")
				m := newPod(t, alice).attach(alice)
				m.hello(json.RawMessage(line))
				if r := <-m.reports; r.Error != nil || r.State == nil {
					t.Errorf("got %+v", r)
				}
			})
		})
	}
}

// A session has one control stream, so that a laptop cannot hold memory with many that it does not read.
func TestSecondControlStreamToAgentIsRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		m := newPod(t, alice).connect(alice)
		st, err := m.session.Open(t.Context(), transport.Request{Proto: transport.ProtoControl})
		if !errors.Is(err, syscall.EACCES) {
			t.Errorf("a second control stream: %v, %v", st, err)
		}
		if err := m.claim("1"); err != nil {
			t.Error(err)
		}
	})
}

func TestAnnouncedProbeIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		if err := m.claim("1"); err != nil {
			t.Fatal(err)
		}
		preface := make([]byte, api.ProbeLength)
		rand.Read(preface[copy(preface, api.ProbePrefix):])
		if err := m.order(api.AgentOrder{Probe: &api.Probe{Preface: preface}}); err != nil {
			t.Fatal(err)
		}
		conn, err := p.incoming[0].Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go conn.Write(preface)
		if got, err := io.ReadAll(conn); string(got) != string(preface) || err != nil {
			t.Errorf("the probe comes back as %q, %v", got, err)
		}
	})
}

// A lost laptop receives no more requests at once, and keeps its claim for a minute.
func TestRequestsGoToTheApplicationWhileTheLaptopIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		m := p.connect(alice)
		if err := m.claim("1"); err != nil {
			t.Fatal(err)
		}
		other := p.connect(p.standby(bob))
		m.lose()
		synctest.Wait()
		if got := p.ask(); got != "application" {
			t.Errorf("%s answers while the laptop is away", got)
		}
		c := other.state("away", func(s *api.AgentState) bool { return len(s.Claims) == 1 && s.Claims[0].Away }).Claims[0]
		if c.Mine || c.Owner != "alice@laptop" {
			t.Errorf("another laptop gets %+v", c)
		}
		want(t, other.claim("2"), api.ExitConflict, "alice@laptop has intercepted everything on port 8080 since")
		pass(50 * time.Second)
		m.find()
		pass(2 * time.Second)
		if got := p.ask(); got != "alice@laptop" {
			t.Errorf("%s answers when the laptop is back", got)
		}
		m.lose()
		pass(59 * time.Second)
		if got := p.kernel.ports(); got != "[tcp/8080]" {
			t.Errorf("before a minute has passed, the agent redirects %s", got)
		}
		pass(2 * time.Second)
		if got := p.kernel.ports(); got != "[]" {
			t.Errorf("after a minute, the agent redirects %s", got)
		}
		if err := other.claim("2"); err != nil {
			t.Errorf("the agent rejects a claim for released requests: %v", err)
		}
	})
}

// standby registers an owner, as its agent does, and returns the owner.
func (p *pod) standby(by *person) *person {
	p.t.Helper()
	s := p.register(by)
	if err := s.next(); err != nil {
		p.t.Fatal(err)
	}
	return by
}

// register runs a standby. next waits for the leader's info.
func (p *pod) register(by *person, sidecar ...api.AgentPort) *follower {
	p.t.Helper()
	f := &follower{infos: make(chan api.AgentInfo, 16), ended: make(chan error, 1)}
	conn, err := p.agents.Dial(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	f.conn = conn
	go func() {
		f.ended <- standBy(context.Background(), conn, registration{by.hash, by.name, sidecar}, func(g api.AgentInfo) error {
			f.infos <- g
			return nil
		})
	}()
	p.t.Cleanup(func() { conn.Close() })
	return f
}

type follower struct {
	conn  net.Conn
	infos chan api.AgentInfo
	ended chan error
}

func (f *follower) next() error {
	select {
	case <-f.infos:
		return nil
	case err := <-f.ended:
		return fmt.Errorf("ended with %w", err)
	case <-time.After(10 * time.Second):
		return errors.New("no info")
	}
}

// The leader releases the claims of a session as soon as the laptop closes it.
func TestClosedSessionReleasesItsClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		if err := m.claim("1"); err != nil {
			t.Fatal(err)
		}
		m.stop()
		synctest.Wait()
		if got := p.kernel.ports(); got != "[]" {
			t.Errorf("redirected: %s", got)
		}
	})
}

func TestTwoOwnersShareAPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		a, b := p.connect(alice), p.connect(p.standby(bob))
		if err := a.claim("1", "x-user=me"); err != nil {
			t.Fatal(err)
		}
		if err := b.claim("1", "x-user=you"); err != nil { // two owners may use the same ID
			t.Errorf("the agent rejects a disjoint claim: %v", err)
		}
		for header, who := range map[string]string{"X-User=me": "alice@laptop", "X-User=you": "bob@desk", "X-User=her": "application"} {
			if got := p.ask(header); got != who {
				t.Errorf("%s answers %s, want %s", got, header, who)
			}
		}
		err := b.claim("2", "x-team=blue")
		want(t, err, api.ExitConflict, "alice@laptop has intercepted x-user=me on port 8080 since "+time.Now().UTC().Format("15:04 MST"))
		if e := api.AsError(err); e == nil || !strings.Contains(e.Hint, "alice@laptop") {
			t.Errorf("the hint is %q", e.Hint)
		}
		mirror := claimOrder("3")
		mirror.Mirror = true
		if err := b.order(api.AgentOrder{Claim: mirror}); err != nil {
			t.Errorf("the agent rejects a mirror: %v", err)
		}
		udp := claimOrder("4")
		udp.Ports = []api.AgentPort{{Protocol: "tcp", Port: 8081}}
		if err := b.order(api.AgentOrder{Claim: udp}); err != nil {
			t.Errorf("the agent rejects another port: %v", err)
		}
		s := a.state("all claims", func(s *api.AgentState) bool { return len(s.Claims) == 4 })
		for _, c := range s.Claims {
			if c.Mine != (c.Owner == "alice@laptop") {
				t.Errorf("alice gets %+v", c)
			}
		}
		if err := b.order(api.AgentOrder{Release: "1"}); err != nil {
			t.Fatal(err)
		}
		if got := p.ask("X-User=me"); got != "alice@laptop" {
			t.Errorf("after the other owner has released the same ID, %s answers", got)
		}
	})
}

// A name proves nothing: the key decides.
func TestSameNameGetsNoClaimOfALaptopThatIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, namesake := newPerson(t, "alice@laptop"), newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		a := p.connect(alice)
		if err := a.claim("1"); err != nil {
			t.Fatal(err)
		}
		b := p.connect(p.standby(namesake))
		want(t, b.claim("1"), api.ExitConflict, "alice@laptop")
		a.lose()
		pass(5 * time.Second)
		err := b.claim("1")
		want(t, err, api.ExitConflict, "alice@laptop")
		if e := api.AsError(err); !strings.Contains(e.Hint, "within a minute") {
			t.Errorf("the hint is %q, want one that names the end of the claim", e.Hint)
		}
		a.find()
		pass(2 * time.Second)
		if got := p.ask(); got != "alice@laptop" {
			t.Errorf("%s answers when the laptop is back", got)
		}
	})
}

// A daemon that replaces a killed one has the same key. So may other programs of its user.
func TestSameKeyTakesOverOnlyClaimsThatAreAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		a := p.connect(alice)
		if err := a.claim("1"); err != nil {
			t.Fatal(err)
		}
		b := p.connect(alice)
		want(t, b.claim("2"), api.ExitConflict, "alice@laptop")
		if err := b.claim("3", "x-user=me"); err == nil {
			t.Error("another session of the same key took over requests of an attached claim")
		}
		a.lose()
		synctest.Wait()
		if err := b.claim("2"); err != nil {
			t.Errorf("the claim of a lost session blocks the new one: %v", err)
		}
	})
}

// The leader forgets an owner without claims and conns, and the owner's agent ends. The last agent ends by itself.
func TestIdleOwnerIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		f := p.register(bob)
		if err := f.next(); err != nil {
			t.Fatal(err)
		}
		b := p.connect(bob)
		pass(5 * time.Minute)
		b.stop() // it was attached until now
		pass(59 * time.Second)
		select {
		case err := <-f.ended:
			t.Fatalf("the leader forgot the owner too early: %v", err)
		default:
		}
		pass(2 * time.Second)
		if err := <-f.ended; !errors.Is(err, errForgotten) {
			t.Errorf("the standby ends with %v", err)
		}
		p.end(time.Second)
		if got := p.kernel.ports(); got != "closed" {
			t.Errorf("redirects are %s", got)
		}
	})
}

func TestLeaderEndsWithoutOwners(t *testing.T) {
	for name, there := range map[string]func(*pod, *person) (leave func()){
		"nobody": func(p *pod, _ *person) func() { return func() {} },
		"attached": func(p *pod, home *person) func() {
			m := p.connect(home)
			return m.stop
		},
		"claimed": func(p *pod, home *person) func() {
			m := p.connect(home)
			if err := m.claim("1"); err != nil {
				p.t.Fatal(err)
			}
			return m.stop
		},
		"standby": func(p *pod, _ *person) func() {
			f := p.register(newPerson(p.t, "bob@desk"))
			if err := f.next(); err != nil {
				p.t.Fatal(err)
			}
			b := time.Now()
			return func() {
				if time.Since(b) > awayTimeout {
					p.t.Error("too late")
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				alice := newPerson(t, "alice@laptop")
				p := newPod(t, alice)
				leave := there(p, alice)
				pass(50 * time.Second)
				leave()
				p.lives()
				pass(2 * awayTimeout)
				p.end(time.Second)
			})
		})
	}
}

// An open connection to the application through the agent keeps the agent running without claims.
func TestOpenConnectionsKeepTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		if err := m.claim("1", "x-user=me"); err != nil {
			t.Fatal(err)
		}
		conn, err := p.incoming[0].Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		in := bufio.NewReader(conn)
		ask := func(header string) {
			t.Helper()
			if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: pod\r\n"+header+"\r\n"); err != nil {
				t.Fatal(err)
			}
			r, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, r.Body)
			r.Body.Close()
		}
		ask("")
		m.stop()
		pass(90 * time.Second)
		ask("Connection: close\r\n")
		if n, err := io.Copy(io.Discard, in); n > 0 || err != nil {
			t.Errorf("%d bytes more, %v", n, err)
		}
		p.end(time.Second)
	})
}

func TestResetReleasesAllClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		f := p.register(bob)
		if err := f.next(); err != nil {
			t.Fatal(err)
		}
		a, b := p.connect(alice), p.connect(bob)
		if err := a.claim("1"); err != nil {
			t.Fatal(err)
		}
		if err := b.order(api.AgentOrder{Reset: true}); err != nil {
			t.Fatal(err)
		}
		for r := range a.reports {
			if r.Error != nil && r.Error.Code == api.ExitIntercept && strings.Contains(r.Error.Message, "bob@desk") {
				break
			}
		}
		p.end(10 * time.Second)
		if err := <-f.ended; !errors.Is(err, errForgotten) {
			t.Errorf("the standby ends with %v", err)
		}
	})
}

// Many changes cause few reports, and the last report has the last state.
func TestReportsAreCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		a, b := p.connect(alice), p.connect(p.standby(bob))
		pass(time.Second)
		for len(b.reports) > 0 {
			<-b.reports
		}
		const changes = 50
		began := time.Now()
		for i := range changes {
			if err := a.claim("1", fmt.Sprintf("x-user=%d", i)); err != nil {
				t.Fatal(err)
			}
			pass(20 * time.Millisecond)
		}
		pass(time.Second)
		reports, last := len(b.reports), ""
		for len(b.reports) > 0 {
			last = (<-b.reports).State.Claims[0].Match
		}
		if most := int(time.Since(began)/reportPause) + 1; reports < 2 || reports > most {
			t.Errorf("%d reports, want 2 to %d", reports, most)
		}
		if want := fmt.Sprintf("x-user=%d", changes-1); last != want {
			t.Errorf("the last report is of %q, want %q", last, want)
		}
	})
}

// A client without an owner's key receives nothing.
func TestUnauthorizedClientsAreRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, mallory := newPerson(t, "alice@laptop"), newPerson(t, "mallory@pod")
		p := newPod(t, alice)
		keep := p.connect(alice) // or the agent would end
		inside := func(config *tls.Config) func(net.Conn) (string, error) {
			return func(conn net.Conn) (string, error) {
				in := tls.Client(conn, config)
				go in.Write([]byte("kubevpn"))
				got, err := io.ReadAll(in)
				return string(got), err
			}
		}
		clear := func(say string) func(net.Conn) (string, error) {
			return func(conn net.Conn) (string, error) {
				go io.WriteString(conn, say)
				got, err := io.ReadAll(conn)
				if len(got) > 0 && got[0] == 21 { // a TLS alert
					got = nil
				}
				return string(got), err
			}
		}
		old := alice.towards()
		old.MaxVersion = tls.VersionTLS12
		for name, test := range map[string]struct {
			visit func(net.Conn) (string, error)
			why   authlistener.Reason
		}{
			"a-key-of-its-own": {inside(mallory.towards()), unauthorized},
			"no-key":           {inside(&tls.Config{InsecureSkipVerify: true}), authlistener.NoCertificate},
			"not-its-key": {inside((&person{key: tls.Certificate{
				Certificate: alice.key.Certificate, PrivateKey: mallory.key.PrivateKey,
			}}).towards()), authlistener.NoTLS},
			"old-tls": {inside(old), authlistener.NoTLS},
			"http":    {clear("GET / HTTP/1.1\r\nHost: pod\r\n\r\n"), authlistener.NoTLS},
			"silence": {clear(""), authlistener.TLSTooSlow},
		} {
			conn, err := p.conns.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := test.visit(conn); got != "" {
				t.Errorf("%s: got %q", name, got)
			}
			conn.Close()
			pass(2 * time.Minute) // until everything is in the log
			if !strings.Contains(p.log.String(), fmt.Sprintf("reason=%q", test.why)) {
				t.Errorf("%s: %q is not in the log", name, test.why)
			}
		}
		if err := keep.claim("1"); err != nil {
			t.Fatal(err)
		}
	})
}

// A laptop may open control streams only.
func TestOtherStreamsAreRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		m := newPod(t, alice).connect(alice)
		for _, proto := range []transport.Proto{transport.ProtoTCP, transport.ProtoTicket, transport.ProtoIP} {
			if _, err := m.session.Open(t.Context(), transport.Request{Proto: proto}); transport.CodeOf(err) != transport.CodeProhibited {
				t.Errorf("%s: %v", proto, err)
			}
		}
	})
}

// An agent that ends first gives the application its ports back, and then waits for open connections.
func TestDrainingWaitsForOpenConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		f := p.register(bob)
		if err := f.next(); err != nil {
			t.Fatal(err)
		}
		m := p.connect(alice)
		if err := m.claim("1"); err != nil {
			t.Fatal(err)
		}
		conn, err := p.incoming[0].Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go io.WriteString(conn, "POST / HTTP/1.1\r\nHost: pod\r\nContent-Length: 4\r\n\r\nha")
		pass(time.Second)
		p.stop()
		synctest.Wait()
		if got := p.kernel.ports(); got != "[]" {
			t.Errorf("redirected: %s", got)
		}
		if err := <-f.ended; err != nil {
			t.Errorf("the standby must take over, but ended with %v", err)
		}
		want(t, m.claim("2"), api.ExitLost, "ending")
		pass(10 * time.Second)
		p.lives()
		go io.WriteString(conn, "lf")
		r, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		if got, err := io.ReadAll(r.Body); string(got) != "alice@laptop" || err != nil {
			t.Errorf("the open connection gets %q, %v", got, err)
		}
		p.end(5 * time.Second)
	})
}

func TestDrainingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		if err := m.claim("1"); err != nil {
			t.Fatal(err)
		}
		conn, err := p.incoming[0].Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go io.WriteString(conn, "POST / HTTP/1.1\r\nHost: pod\r\nContent-Length: 4\r\n\r\nha")
		pass(time.Second)
		p.stop()
		pass(drainTime - time.Second)
		p.lives()
		p.end(5 * time.Second)
	})
}

// A sidecar serves its ports with and without claims, and does not end.
func TestSidecarListensInPlaceOfRedirects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice, func(c *Config) {
			c.Listen = []api.AgentPort{{Protocol: "tcp", Port: 8080, Listen: 18080}}
			c.kernel = func() (kernel, error) {
				t.Error("a sidecar opened the kernel's redirects")
				return nil, errors.ErrUnsupported
			}
		})
		ask := func() string { return askOn(t.Context(), t, p.incoming[18080]) }
		if got := ask(); got != "application" {
			t.Errorf("%s answers", got)
		}
		pass(10 * time.Minute)
		p.lives()
		m := p.connect(alice)
		o := claimOrder("1")
		want(t, m.order(api.AgentOrder{Claim: o}), api.ExitInject, "sidecar")
		o.Ports[0].Listen = 18081
		want(t, m.order(api.AgentOrder{Claim: o}), api.ExitConflict, "18080, not 18081")
		o.Ports[0].Listen = 18080
		if err := m.order(api.AgentOrder{Claim: o}); err != nil {
			t.Fatal(err)
		}
		if got := ask(); got != "alice@laptop" {
			t.Errorf("%s answers", got)
		}
		s := m.state("the claim", func(s *api.AgentState) bool { return len(s.Claims) == 1 })
		if !strings.HasPrefix(s.Source, "header: ") {
			t.Errorf("the source is %q", s.Source)
		}
		o.Flush = true
		if err := m.order(api.AgentOrder{Claim: o}); err != nil {
			t.Fatal(err)
		}
		m.state("a note that old connections stay", func(s *api.AgentState) bool { return len(s.Claims[0].Notes) == 1 })
		m.stop()
		pass(10 * time.Minute)
		p.lives()
		if got := ask(); got != "application" {
			t.Errorf("%s answers", got)
		}
	})
}

// The leader serves the ports of a sidecar that stands by, and keeps its owner as long as the sidecar runs.
func TestLeaderListensForSidecarsThatStandBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice, func(c *Config) { c.Listen = []api.AgentPort{{Protocol: "tcp", Port: 8080, Listen: 18080}} })
		if err := p.register(newPerson(t, "carol@train"), api.AgentPort{Protocol: "tcp", Port: 8080, Listen: 18081}).next(); err == nil {
			t.Error("the leader accepted another port for the same port of the application")
		}
		f := p.register(bob, api.AgentPort{Protocol: "tcp", Port: 8080, Listen: 18080}, api.AgentPort{Protocol: "tcp", Port: 8082, Listen: 18082})
		if err := f.next(); err != nil {
			t.Fatal(err)
		}
		if p.incoming[18082] == nil {
			t.Fatal("nobody listens")
		}
		pass(10 * time.Minute)
		select {
		case err := <-f.ended:
			t.Errorf("the standby has ended: %v", err)
		default:
		}
		b := p.connect(bob)
		if err := b.order(api.AgentOrder{Reset: true}); err != nil {
			t.Fatal(err)
		}
		pass(time.Minute)
		p.lives()
		f.conn.Close()
		b.stop()
		pass(10 * time.Minute)
		if conn, err := p.conns.Dial(t.Context()); err != nil {
			t.Error(err)
		} else {
			if _, err := tls.Client(conn, bob.towards()).Read(make([]byte, 1)); err == nil {
				t.Error("the leader did not forget an owner whose sidecar has ended")
			}
			conn.Close()
		}
	})
}

func TestFlushEndsOpenConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		m := p.connect(alice)
		o := claimOrder("1")
		o.Flush = true
		if err := m.order(api.AgentOrder{Claim: o}); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(p.kernel.flushed); got != "[tcp/8080]" {
			t.Errorf("flushed: %s", got)
		}
	})
}

// The leader rejects a process that connects to the agents' socket and does not register.
func TestInvalidRegistrationsAreRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		p := newPod(t, alice)
		for name, line := range map[string]string{
			"garbage":     "hello\n",
			"no-hash":     "{}\n",
			"short-hash":  `{"owner":"YWJj"}` + "\n",
			"long-name":   `{"owner":"` + alice.hash + `","name":"` + strings.Repeat("x", 300) + `"}` + "\n",
			"endless":     strings.Repeat("x", 1<<20),
			"nothing":     "",
			"half-a-line": `{"owner":"` + alice.hash,
		} {
			conn, err := p.agents.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			go io.WriteString(conn, line)
			began := time.Now()
			got, err := io.ReadAll(conn)
			if err != nil || time.Since(began) > messageTimeout {
				t.Errorf("%s: %v after %v", name, err, time.Since(began))
			}
			var m message
			if len(got) > 0 && (json.Unmarshal(got, &m) != nil || m.Error == nil || m.Info != nil) {
				t.Errorf("%s: got %q", name, got)
			}
			conn.Close()
		}
	})
}

// An error of the start is on the output, which the owner reads.
func TestErrorIsOnTheOutput(t *testing.T) {
	g := newInfos()
	a := New(Config{Owner: "nobody", Socket: fmt.Sprintf("@kubevpn-test-%s", t.Name()), Output: g, Logger: slog.New(slog.DiscardHandler)})
	a.cfg.kernel = func() (kernel, error) { return nil, errors.ErrUnsupported }
	err := a.Run(t.Context())
	want(t, err, api.ExitUsage, "nobody")
	if said := g.next(t); said.Error == nil || said.Error.Code != api.ExitUsage {
		t.Errorf("said %+v", said)
	}
}
