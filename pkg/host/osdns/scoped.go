package osdns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/pkg/wakeup"
)

// dnsKey is the key of the dynamic store that changes with the nameservers of the machine.
const dnsKey = "State:/Network/Global/DNS"

// retryInterval is the pause after a change that could not be followed.
const retryInterval = 2 * time.Second

// scoped keeps resolvers for the domains of the last Set in macOS' dynamic store: programs ask kubevpn's resolver for
// names under these domains, and for no others. Its methods are safe for concurrent use.
//
//	Set(cfg)            a watched key, or the end of scutil
//	   │                        │
//	   ▼                        ▼
//	storeKeys ─▶ reconcile: list the keys, script(present, wanted), read back ─▶ flush, OnChange
type scoped struct {
	opt     Options
	program []string   // scutil
	owner   string     // in the names of the keys
	flushes [][]string // commands that empty the caches of the system
	retry   time.Duration
	changed wakeup.Signal

	mu      sync.Mutex // guards all below
	cfg     Config
	session *scutil
	keys    []storeKey // of the session
	applied Applied
	watcher watcher
}

// Set configures the machine's name resolution. It may be called again with the same cfg. After an error nothing is
// configured. While a Config is set, a goroutine follows the changes of the machine; Close or the zero Config ends it.
func (c *scoped) Set(cfg Config) (Applied, error) {
	if err := cfg.validate(); err != nil {
		return Applied{}, err
	}
	if cfg.zero() {
		return Applied{}, c.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg = cfg
	if err := c.reconcile(); err != nil {
		c.cfg = Config{}
		return Applied{}, errors.Join(err, c.end())
	}
	c.watcher.start(c.watch)
	return c.applied, nil
}

// Close restores name resolution as it was before the first Set. The scoped can be used again.
func (c *scoped) Close() error {
	c.watcher.stop(&c.mu)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg = Config{}
	return c.end()
}

// end ends the session, and with it the keys. The caller holds mu.
func (c *scoped) end() error {
	if c.session == nil {
		return nil
	}
	err := c.session.close()
	c.session, c.keys, c.applied = nil, nil, Applied{}
	c.flush()
	return err
}

// reconcile replaces the present keys by those of the config. The caller holds mu.
func (c *scoped) reconcile() (err error) {
	if c.session == nil {
		if c.session, err = startScutil(c.program, c.changed); err != nil {
			return err
		}
	}
	present, err := c.present()
	if err != nil {
		return err
	}
	c.keys = slices.DeleteFunc(c.keys, func(k storeKey) bool { return !slices.Contains(present, k.Name) })
	wanted, warnings := storeKeys(c.cfg, c.owner)
	if commands := script(c.keys, wanted); commands != "" {
		said, err := c.session.do(commands)
		if err != nil {
			return err
		}
		if present, err = c.present(); err != nil {
			return err
		}
		for _, k := range wanted {
			if !slices.Contains(present, k.Name) {
				return fmt.Errorf("scutil added no key %s: %s", k.Name, strings.Join(said, "; "))
			}
		}
		c.keys = wanted
		c.flush()
	}
	upstreams, err := c.upstreams()
	if err != nil {
		return err
	}
	c.applied = Applied{Mode: ModeDarwin, Upstreams: upstreams, Warnings: warnings}
	return nil
}

// present returns the names of this process's keys in the store. The caller holds mu.
func (c *scoped) present() ([]string, error) {
	lines, err := c.session.do("list State:/Network/Service/" + c.owner + "-[^/]*/DNS\n")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, line := range lines {
		if _, name, ok := strings.Cut(line, "] = "); ok && strings.HasPrefix(line, "subKey [") {
			names = append(names, name)
		}
	}
	return names, nil
}

// upstreams returns the nameservers of the machine, without those of the config. The caller holds mu.
func (c *scoped) upstreams() ([]netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, c.program[0], append(slices.Clone(c.program[1:]), "--dns")...).Output()
	if err != nil {
		return nil, fmt.Errorf("scutil --dns: %w", err)
	}
	return slices.DeleteFunc(defaultNameservers(string(out)), func(a netip.AddrPort) bool {
		return a == c.cfg.Listen4 || a == c.cfg.Listen6 ||
			slices.ContainsFunc(c.cfg.Links, func(l Link) bool { return l.Resolver == a.Addr() })
	}), nil
}

// Nameservers returns the nameservers of the machine, without those of the last Set.
func (c *scoped) Nameservers() ([]netip.AddrPort, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.upstreams()
}

// flush empties the caches, in which names of the cluster may be missing. Names resolve without it, but later.
func (c *scoped) flush() {
	for _, command := range c.flushes {
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
		if out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
			c.opt.Logger.Warn("emptying a cache of names", "command", command, "error", err, "output", string(out))
		}
		cancel()
	}
}

// watch reconciles when the machine changes, until ctx ends.
func (c *scoped) watch(ctx context.Context) {
	var again <-chan time.Time // nil: nothing to retry
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.changed:
		case <-again:
		}
		again = nil
		applied, differs, err := c.follow(ctx)
		if err != nil {
			c.opt.Logger.Error("following a change of the machine's DNS", "error", err)
			again = time.After(c.retry)
		} else if differs {
			c.opt.OnChange(applied)
		}
	}
}

// follow reconciles, with a new session if the old one is broken. It reports whether the result differs.
func (c *scoped) follow(ctx context.Context) (applied Applied, differs bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ctx.Err() != nil || c.cfg.zero() {
		return Applied{}, false, nil
	}
	before := c.applied
	if err := c.reconcile(); err != nil {
		if c.session != nil {
			err = errors.Join(err, c.session.close())
			c.session, c.keys = nil, nil
		}
		return Applied{}, false, err
	}
	return c.applied, !reflect.DeepEqual(before, c.applied), nil
}
