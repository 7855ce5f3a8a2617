package redirect

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// Redirects are there for as long as they are renewed, and connections do not notice it. When nobody is left they end by
// themselves, five seconds after the last renewal.
func TestLease(t *testing.T) {
	for _, way := range ruleWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel() // it takes its time, for itself
			if testenv.InNamespace(t, "iptables-nft", "iptables-legacy") {
				testLease(t, way)
			}
		})
	}
}

func testLease(t *testing.T, way string) {
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, application(53)...)
	began := time.Now()
	h := holder(t, way, "test")
	open4, open6, flow := p.connect("tcp", "10.1.0.2:80"), p.connect("tcp", "[fd00:1::2]:80"), p.connect("udp", "10.1.0.2:53")
	for time.Since(began) < lease+2*time.Second && !t.Failed() {
		check(t, "new", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
		check(t, "new, IPv6", p.ask("tcp", "[fd00:1::2]:80"), "us for [fd00:1::2]:80")
		check(t, "new, UDP", p.ask("udp", "10.1.0.2:53"), "us 10.1.0.9")
		check(t, "open", ask(open4), "us for 10.1.0.2:80")
		check(t, "open, IPv6", ask(open6), "us for [fd00:1::2]:80")
		check(t, "open, UDP", ask(flow), "us 10.1.0.9")
	}
	killed := time.Now()
	kill(t, h)
	if got := p.ask("tcp", "10.1.0.2:80"); !strings.Contains(got, "connection refused") {
		t.Errorf("as it is killed: %q, which is not for want of a lease", got)
	}
	for to, network := range map[string]string{"10.1.0.2:80": "tcp", "[fd00:1::2]:80": "tcp", "10.1.0.2:53": "udp"} {
		testenv.Eventually(t, patience, func() error {
			c, err := p.dial(network, to, net.Dialer{})
			if err != nil {
				return err
			}
			defer c.Close()
			// Not every datagram to where nobody is has an answer: the kernel has a limit for them.
			if got := askAt(c, 1, 200*time.Millisecond); !strings.HasPrefix(got, "app ") {
				return fmt.Errorf("%s %s: %q", network, to, got)
			}
			return nil
		})
	}
	took := time.Since(killed)
	t.Logf("the application has its ports back after %v", took.Round(time.Millisecond))
	if took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	if left := list[way](t); !strings.Contains(left, "--dport 80") {
		t.Errorf("something else than the clock has ended it; there is\n%s", left)
	}
}

// Remove has the application back at once, with clients that keep their UDP socket; a later New does as well, whichever way it
// redirects.
func TestRemove(t *testing.T) { each(t, ruleWays, testRemove) }

func testRemove(t *testing.T, way string) {
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, application(53)...)
	testenv.Run(t, way+" -t nat -N KUBEVPN-0-OTHER")
	testenv.Run(t, way+" -t nat -A PREROUTING -p tcp --dport 9 -j KUBEVPN-0-OTHER")
	before := savedNAT(t, inVariant[way])
	for what, remove := range map[string]func(t *testing.T){
		"Remove": func(t *testing.T) {
			if err := Remove(config(way, "test")); err != nil {
				t.Fatal(err)
			}
			if err := Remove(config(way, "test")); err != nil {
				t.Errorf("again: %v", err)
			}
		},
		"New, nftables": func(t *testing.T) {
			cfg := config(way, "other")
			cfg.Backend = NFTables
			openWith(t, cfg)
		},
		"New, iptables":            func(t *testing.T) { openWith(t, config(way, "other")) },
		"New, iptables, same name": func(t *testing.T) { openWith(t, config(way, "test")) },
	} {
		t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
			h := holder(t, way, "test")
			flow := p.connect("udp", "10.1.0.2:53")
			check(t, "redirected", ask(flow), "us 10.1.0.9")
			kill(t, h)
			if err := Remove(Config{Name: "other", Mark: testMark, Programs: programs}); err != nil {
				t.Fatal(err)
			}
			if got := p.ask("tcp", "10.1.0.2:80"); !strings.Contains(got, "connection refused") {
				t.Fatalf("killed: %q", got)
			}
			remove(t)
			check(t, "TCP", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")
			check(t, "IPv6", p.ask("tcp", "[fd00:1::2]:80"), "app fd00:1::9")
			check(t, "UDP", p.ask("udp", "10.1.0.2:53"), "app 10.1.0.9")
			check(t, "UDP of the same socket", ask(flow), "app 10.1.0.9")
		})
		check(t, "left behind after "+what, savedNAT(t, inVariant[way]), before)
	}
}

// A clock that is set ends redirects until they are renewed, whichever way it is set: what the kernel has then was made by
// another clock.
func TestClockIsSet(t *testing.T) { each(t, ruleWays, testClockIsSet) }

func testClockIsSet(t *testing.T, way string) {
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, redirector(8080)...)
	cfg := config(way, "test")
	cfg.Logger = slog.New(slog.DiscardHandler)
	b, err := openRules(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	}()
	if err := b.set(map[Port]uint16{web: 8080}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		ahead time.Duration // the former clock
		want  string
	}{
		{-time.Hour, "app 10.1.0.9"}, {-lease - time.Second, "app 10.1.0.9"}, {-time.Second, "us for 10.1.0.2:80"},
		{time.Second, "us for 10.1.0.2:80"}, {backstep + 2*time.Second, "app 10.1.0.9"}, {time.Hour, "app 10.1.0.9"},
	} {
		b.now = func() time.Time { return time.Now().Add(tt.ahead) }
		if err := b.renew(); err != nil {
			t.Fatal(err)
		}
		check(t, fmt.Sprintf("a clock that was %v ahead", tt.ahead), p.ask("tcp", "10.1.0.2:80"), tt.want)
	}
	b.now = time.Now
	if err := b.renew(); err != nil {
		t.Fatal(err)
	}
	check(t, "renewed", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
}

// Others' redirects stay theirs, and of two for a port theirs is the first: a mesh's, say.
func TestRulesBesideOthers(t *testing.T) { each(t, ruleWays, testRulesBesideOthers) }

func testRulesBesideOthers(t *testing.T, way string) {
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, redirector(8080)...)
	serve(t, server{TCP, ":15006", "mesh", nil})
	for _, program := range []string{way, strings.Replace(way, "ip", "ip6", 1)} {
		testenv.Run(t, program+" -t nat -A PREROUTING -p tcp -j REDIRECT --to-ports 15006")
	}
	r := openWith(t, config(way, "test"))
	check(t, "theirs", p.ask("tcp", "10.1.0.2:80"), "mesh 10.1.0.9")
	set(t, r, map[Port]uint16{web: 8080})
	check(t, "theirs and ours", p.ask("tcp", "10.1.0.2:80"), "mesh 10.1.0.9")
	check(t, "theirs and ours, IPv6", p.ask("tcp", "[fd00:1::2]:80"), "mesh fd00:1::9")
	for _, program := range []string{way, strings.Replace(way, "ip", "ip6", 1)} { // theirs, but for what is ours
		testenv.Run(t, program+" -t nat -R PREROUTING 1 -p tcp ! --dport 80 -j REDIRECT --to-ports 15006")
	}
	check(t, "ours", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	check(t, "ours, IPv6", p.ask("tcp", "[fd00:1::2]:80"), "us for [fd00:1::2]:80")
	check(t, "theirs, another port", p.ask("tcp", "10.1.0.2:81"), "mesh 10.1.0.9")
	check(t, "within", within("tcp", "10.1.0.2:80", net.Dialer{}), "app 10.1.0.2")
	set(t, r, nil)
	check(t, "nobody's", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")
}

// without is a directory of programs that fail where their input or their name matches a pattern of the shell, as they do where
// the kernel lacks something.
func without(t *testing.T, pattern string) string {
	t.Helper()
	dir := t.TempDir()
	script := `#!/bin/sh
input=$(cat)
case "$1 $input" in ` + pattern + `) echo "no such thing" >&2; exit 1;; esac
echo "$input" | exec ` + programs + `/xtables-nft-multi "$@"
`
	if err := os.WriteFile(filepath.Join(dir, "xtables-nft-multi"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A kernel without xt_time has redirects that do not end by themselves, and the log says so.
func TestWithoutTime(t *testing.T) {
	if !testenv.InNamespace(t, "iptables-nft") {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, redirector(8080)...)
	var log strings.Builder
	cfg := config(byNFT, "test")
	cfg.Programs, cfg.Logger = without(t, `*"-m time"*`), slog.New(slog.NewTextHandler(&log, nil))
	r := openWith(t, cfg)
	set(t, r, map[Port]uint16{web: 8080})
	if !strings.Contains(log.String(), "xt_time") {
		t.Errorf("the log has nothing of it:\n%s", &log)
	}
	if rules := savedNAT(t, "nft"); strings.Contains(rules, "-m time") || !strings.Contains(rules, "--dport 80") {
		t.Errorf("the rules are\n%s", rules)
	}
	check(t, "redirected", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	if err := Remove(config(byNFT, "test")); err != nil {
		t.Fatal(err)
	}
	check(t, "removed", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")
}

func TestWithoutNATForIPv6(t *testing.T) {
	if !testenv.InNamespace(t, "iptables-nft") {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, redirector(8080)...)
	var log strings.Builder
	cfg := config(byNFT, "test")
	cfg.Programs, cfg.Logger = without(t, `"ip6tables-restore "*`), slog.New(slog.NewTextHandler(&log, nil))
	set(t, openWith(t, cfg), map[Port]uint16{web: 8080})
	check(t, "IPv4", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	check(t, "IPv6", p.ask("tcp", "[fd00:1::2]:80"), "app fd00:1::9")
	if !strings.Contains(log.String(), "connections by IPv6 stay with the application") {
		t.Errorf("the log has nothing of it:\n%s", &log)
	}
}

// A kernel that refuses the table has iptables, which needs somebody to call Remove.
func TestFallback(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "iptables-nft") {
		return
	}
	p := newPod(t)
	serve(t, application(80)...)
	serve(t, redirector(8080)...)
	refused := Config{Name: strings.Repeat("long", 100), Mark: testMark, Programs: programs}
	if err := Owned(refused); err == nil {
		t.Error("no table, and nothing outlives the process")
	}
	r := openWith(t, refused)
	set(t, r, map[Port]uint16{web: 8080})
	check(t, "redirected", p.ask("tcp", "10.1.0.2:80"), "us for 10.1.0.2:80")
	if got := ruleset(t); strings.Contains(got, "table inet") {
		t.Errorf("there is\n%s", got)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	check(t, "after Close", p.ask("tcp", "10.1.0.2:80"), "app 10.1.0.9")

	ordinary := refused
	ordinary.Name = "test"
	if err := Owned(ordinary); err != nil {
		t.Errorf("this kernel has such tables, but: %v", err)
	}
	set(t, openWith(t, ordinary), map[Port]uint16{web: 8080})
	if got := ruleset(t); !strings.Contains(got, "table inet test") || strings.Contains(got, "KUBEVPN") {
		t.Errorf("there is\n%s", got)
	}

	nowhere := refused
	nowhere.Programs = ""
	if err := Owned(nowhere); err != nil {
		t.Errorf("New fails, and leaves nothing; but: %v", err)
	}
	if _, err := New(nowhere); err == nil || strings.Contains(err.Error(), "iptables") {
		t.Errorf("without programs: %v", err)
	}
	nowhere.Programs = t.TempDir()
	if _, err := New(nowhere); err == nil || !strings.Contains(err.Error(), "iptables-nft") || !strings.Contains(err.Error(), "iptables-legacy") || !strings.Contains(err.Error(), "owner") {
		t.Errorf("without programs where they should be: %v", err)
	}
	nowhere.Backend = "magic"
	if _, err := New(nowhere); err == nil {
		t.Error("there is magic")
	}
}

func TestRulesErrors(t *testing.T) { each(t, ruleWays, testRulesErrors) }

func testRulesErrors(t *testing.T, way string) {
	cmd := child("unprivileged", way)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &nobody}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	says := map[string]string{byNFT: "iptables-nft-restore: exit status 4: ", byLegacy: "iptables-legacy-restore: exit status 2: "}[way]
	if got := string(out); !strings.HasPrefix(got, "redirecting by iptables: ") || !strings.Contains(got, says) {
		t.Errorf("without a capability: %s", got)
	}
}
