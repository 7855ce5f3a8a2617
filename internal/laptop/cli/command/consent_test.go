//go:build unix

package command

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/creack/pty"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/testenv"
)

// labCluster returns a cluster that does not answer.
func labCluster(t *testing.T) *client.Cluster {
	t.Helper()
	c, err := client.Load([]byte(`
apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: lab, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: ann, user: {token: t}}]
contexts: [{name: lab, context: {cluster: lab, user: ann}}]
`), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCtrlCEndsTheQuestion(t *testing.T) {
	person, terminal, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer person.Close()
	defer terminal.Close()
	ctx, cancel := context.WithCancel(t.Context())
	c := Consenting{Factory: &Factory{Streams: term.Streams{In: terminal, Errout: terminal}}, Cluster: labCluster(t), Consent: &api.Consent{}, Quiet: func() {}}
	ended := make(chan error, 1)
	go func() {
		e := api.NeedsManager(api.TrustedManager{Namespace: "kubevpn", Image: "k:1\x1b[2J"}, "not yours")
		ended <- c.Allow(ctx, e, func(api.Event) {})
	}()
	shown := readUntil(t, person, "[y/N] ")
	if !strings.Contains(shown, "image           k:1[2J") {
		t.Errorf("it was asked %q", shown)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want an interrupt", err)
	}
}

func TestOutputForProgramsHasNoQuestion(t *testing.T) {
	_, terminal, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	for _, value := range []string{"json", "yaml", "name", "jsonpath={.id}"} {
		output := term.NewObjectFormat("text")
		if err := output.Set(value); err != nil {
			t.Fatal(err)
		}
		f := &Factory{Streams: term.Streams{In: terminal, Errout: terminal}}
		flags := ConnectionFlags{ClusterFlags: ClusterFlags{f: f}, Cluster: labCluster(t)}
		c := flags.Consenting(&api.ConnectRequest{}, output, func() {})
		e := c.Allow(t.Context(), api.NeedsManager(api.TrustedManager{Namespace: "kubevpn"}, "not yours"), func(api.Event) {})
		if got := api.AsError(e); got == nil || got.Code != api.ExitConsent || !strings.Contains(got.Hint, "--yes") {
			t.Errorf("-o %s: got %v", value, e)
		}
	}
}

func readUntil(t *testing.T, r interface{ Read([]byte) (int, error) }, end string) string {
	t.Helper()
	var all strings.Builder
	for b := make([]byte, 256); !strings.HasSuffix(all.String(), end); {
		n, err := r.Read(b)
		if err != nil {
			t.Fatalf("%v after %q", err, all.String())
		}
		all.Write(b[:n])
	}
	return all.String()
}

func TestQuestionNamesAtMostTwentyNetworks(t *testing.T) {
	var many []netip.Prefix
	for i := range 5000 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{203, byte(i >> 8), byte(i), 0}), 24))
	}
	got := described(&api.Consent{Networks: many})
	if !strings.Contains(got, "203.0.19.0/24 and 4980 more\n") || strings.Contains(got, "203.0.20.0/24") {
		t.Errorf("got %q", got)
	}
	if got := described(&api.Consent{Networks: many[:2]}); !strings.Contains(got, "203.0.0.0/24, 203.0.1.0/24\n") {
		t.Errorf("got %q", got)
	}
}

// A user who does not trust the manager must not be asked for a password first.
func TestUserIsAskedAboutTheManagerBeforeSudo(t *testing.T) {
	lab := labCluster(t)
	manager := api.TrustedManager{Namespace: "kubevpn", NamespaceUID: "1", Repository: "k", ServiceAccount: "kubevpn"}
	home := t.TempDir()
	run := func(yes bool) (consent api.Consent, found, requested int, err error) {
		c := Consenting{
			Factory: &Factory{Streams: term.Streams{In: strings.NewReader(""), Errout: &testenv.Buffer{}}, Lookup: func(name string) (string, bool) {
				return home, name == "HOME" || name == "XDG_RUNTIME_DIR"
			}},
			Cluster: lab, Consent: &consent, Yes: yes, Quiet: func() {},
			Find: func(context.Context) error { found++; return api.NeedsManager(manager, "not yours") },
		}
		err = c.Run(t.Context(), func(api.Event) {}, func(func(api.Event)) error { requested++; return nil })
		return consent, found, requested, err
	}
	if _, _, requested, err := run(false); requested != 0 || api.AsError(err) == nil || api.AsError(err).Code != api.ExitConsent {
		t.Errorf("%d requests, %v; want none, and exit code %d", requested, err, api.ExitConsent)
	}
	if consent, _, requested, err := run(true); requested != 1 || err != nil || len(consent.Managers) != 1 {
		t.Errorf("%d requests, consent %+v, %v", requested, consent, err)
	}
	if _, found, requested, err := run(false); found != 0 || requested != 1 || err != nil {
		t.Errorf("a manager that is trusted was looked for %d times; %d requests, %v", found, requested, err)
	}
}
