//go:build linux

package agent

import (
	"errors"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// A pod without an application is ready while a laptop answers whose program listens.
func TestReadinessIsThatOfTheLaptop(t *testing.T) {
	alice := newPerson(t, "alice@laptop")
	p := newPod(t, alice, func(c *Config) {
		c.Listen, c.ReadyPort = []api.AgentPort{{Protocol: "tcp", Port: 80, Listen: 10080}}, 9001
	})
	probe := func() string { return askOn(t.Context(), t, p.incoming[9001]) }
	if got := probe(); !strings.Contains(got, errNoClaim.Error()) {
		t.Errorf("without a laptop: %q", got)
	}
	l := p.connect(alice)
	if _, err := l.answer(api.AgentOrder{Claim: &api.ClaimOrder{ID: "1", Since: time.Now(), Ports: []api.AgentPort{{Protocol: "tcp", Port: 80, Listen: 10080}}}}); err != nil {
		t.Fatal(err)
	}
	if got := probe(); got != "" {
		t.Errorf("with a laptop: %q", got)
	}
	if got := askOn(t.Context(), t, p.incoming[10080]); got != "alice@laptop" {
		t.Errorf("a request is answered by %q", got)
	}
	l.stop()
	testenv.Eventually(t, 5*time.Second, func() error {
		if got := probe(); !strings.Contains(got, errLaptopAway.Error()) && !strings.Contains(got, errNoClaim.Error()) {
			return errors.New(got)
		}
		return nil
	})
}
