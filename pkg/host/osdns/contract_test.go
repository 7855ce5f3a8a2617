package osdns

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// configurator is a Configurator of one system.
type configurator interface {
	Set(cfg Config) (Applied, error)
	Close() error
}

// machine is what a Configurator configures.
type machine struct {
	configurator
	cfg   Config        // with a resolver and a link that exist
	state func() string // of all that a Configurator may change
}

// keepsTheContract is the contract test of Configurator, on every system and in every mode. The helper relies on it.
// open returns one that has configured nothing.
func keepsTheContract(t *testing.T, mode Mode, open func(t *testing.T) machine) {
	for name, test := range map[string]func(t *testing.T, m machine, mode Mode){
		"nothing_is_wanted":                      contractNothing,
		"set_again_is_the_same":                  contractAgain,
		"invalid_config_changes_nothing":         contractInvalid,
		"close_restores_and_can_be_called_twice": contractClose,
		"can_be_used_again_after_close":          contractReuse,
	} {
		t.Run(name, func(t *testing.T) {
			m := open(t)
			t.Cleanup(func() {
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			})
			test(t, m, mode)
		})
	}
}

// sets calls Set with the machine's config, and checks the result.
func (m machine) sets(t *testing.T, mode Mode) Applied {
	t.Helper()
	applied, err := m.Set(m.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if applied.Mode != mode {
		t.Fatalf("mode %q, want %q", applied.Mode, mode)
	}
	own := []netip.Addr{m.cfg.Listen4.Addr(), m.cfg.Listen6.Addr(), m.cfg.Links[0].Resolver}
	for _, upstream := range applied.Upstreams {
		for _, a := range own {
			if upstream.Addr() == a {
				t.Errorf("the upstream %s is an address of the config", upstream)
			}
		}
	}
	return applied
}

// is fails the test unless the machine is in a state.
func (m machine) is(t *testing.T, want string) {
	t.Helper()
	if diff := cmp.Diff(want, m.state()); diff != "" {
		t.Errorf("state of the machine (-want +got):\n%s", diff)
	}
}

func contractNothing(t *testing.T, m machine, _ Mode) {
	before := m.state()
	if applied, err := m.Set(Config{}); err != nil || applied.Mode != ModeNone || len(applied.Upstreams) > 0 {
		t.Errorf("applied %+v, %v", applied, err)
	}
	m.is(t, before)
}

func contractAgain(t *testing.T, m machine, mode Mode) {
	before := m.state()
	first := m.sets(t, mode)
	during := m.state()
	if during == before {
		t.Error("Set has changed nothing")
	}
	if diff := cmp.Diff(first, m.sets(t, mode), cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("the second Set (-first +second):\n%s", diff)
	}
	m.is(t, during)
}

func contractInvalid(t *testing.T, m machine, mode Mode) {
	m.sets(t, mode)
	during := m.state()
	elsewhere := m.cfg
	elsewhere.Listen4 = netip.MustParseAddrPort("192.0.2.53:53")
	nameless := m.cfg
	nameless.Links = []Link{{Resolver: m.cfg.Links[0].Resolver}}
	for name, cfg := range map[string]Config{"resolver on no loopback address": elsewhere, "link without a name": nameless} {
		if applied, err := m.Set(cfg); err == nil {
			t.Errorf("%s: applied %+v, want an error", name, applied)
		}
	}
	m.is(t, during)
}

func contractClose(t *testing.T, m machine, mode Mode) {
	before := m.state()
	m.sets(t, mode)
	for range 2 {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		m.is(t, before)
	}
}

func contractReuse(t *testing.T, m machine, mode Mode) {
	before := m.state()
	first := m.sets(t, mode)
	if applied, err := m.Set(Config{}); err != nil || applied.Mode != ModeNone {
		t.Errorf("the zero Config: applied %+v, %v", applied, err)
	}
	m.is(t, before)
	if diff := cmp.Diff(first, m.sets(t, mode), cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("after the zero Config (-first +again):\n%s", diff)
	}
}
