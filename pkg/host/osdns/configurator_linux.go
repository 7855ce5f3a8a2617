package osdns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// pollInterval is the pause between two looks at resolv.conf. Programs replace it by rename, often behind several
// symlinks, which inotify does not follow well. A stat every two seconds is cheap.
const pollInterval = 2 * time.Second

// settleInterval is how long a changed resolv.conf must stay the same before the Configurator reads it: some programs
// write it in place, so it is empty at first.
const settleInterval = 100 * time.Millisecond

// maxTramples is how often the Configurator repeats its edit of resolv.conf after another program replaced it.
const maxTramples = 10

// uplinks is the list of systemd-resolved's upstream servers, in the format of resolv.conf.
const uplinks = "/run/systemd/resolve/resolv.conf"

// Configurator keeps the resolver in the path of this machine's DNS queries, according to the last Set. Its methods are
// safe for concurrent use. It acts on the network and mount namespace of the process.
//
//	Set(cfg)                      tick, D-Bus signal
//	   │                                 │
//	   ▼                                 ▼
//	observe ──▶ plan ──▶ enact      reconcile (the same) ──▶ OnChange
type Configurator struct {
	opt       Options
	poll      time.Duration
	openTable func(name string) (*ownerTable, error)

	mu       sync.Mutex // guards all below
	cfg      Config
	decision decision
	applied  Applied
	table    *ownerTable // open while it has rules, or while a Set checks whether it works
	resolved *resolved
	journal  *journal
	tramples int
	gaveUp   bool // stopped editing resolv.conf, because another program keeps replacing it
	seen     seen // by the last reconcile
	fresh    seen // by the last follow that saw a difference
	failed   bool // the last reconcile failed; the next tick tries again
	watcher  watcher
}

// seen identifies the versions of the files that a reconcile depends on.
type seen struct{ resolvConf, uplinks signature }

func (c *Configurator) look() seen {
	return seen{signatureOf(c.opt.ResolvConf), signatureOf(uplinks)}
}

// New returns a Configurator that has configured nothing. It does no I/O.
func New(opt Options) *Configurator {
	opt = opt.withDefaults()
	return &Configurator{
		opt:       opt,
		poll:      pollInterval,
		openTable: openTable,
		journal:   &journal{path: opt.ResolvConf, dir: opt.StateDir},
	}
}

// Set configures the machine's name resolution and reports the method. It may be called again with the same cfg. After
// an error the machine may be between the old and the new state; a later Set continues from there.
//
// While a Config is set, a goroutine watches resolv.conf and systemd-resolved. Close or the zero Config ends it.
func (c *Configurator) Set(cfg Config) (Applied, error) {
	if err := cfg.validate(); err != nil {
		return Applied{}, err
	}
	if cfg.zero() {
		return Applied{}, c.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg, c.tramples, c.gaveUp = cfg, 0, false
	err := c.reconcile(true)
	if err == nil {
		c.watcher.start(c.watch)
	}
	return c.applied, err
}

// Nameservers returns the nameservers that this machine asks now, upstream servers of systemd-resolved among them. It
// leaves out the resolvers of the last Set.
func (c *Configurator) Nameservers() ([]netip.AddrPort, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	content, _, err := c.journal.original()
	if err != nil {
		return nil, err
	}
	up, err := os.ReadFile(uplinks)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return port53(without(slices.Concat(nameservers(content), nameservers(up)), c.cfg)), nil
}

// Close restores name resolution as it was before the first Set. The Configurator can be used again.
func (c *Configurator) Close() error {
	c.watcher.stop(&c.mu)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg, c.applied = Config{}, Applied{}
	err := errors.Join(c.closeJournal(), c.closeTable(), c.closeBus())
	c.forget(c.decision.Redirect)
	c.decision = decision{}
	return err
}

// Recover undoes the edit of resolv.conf that a process left when it ended without Close. Call it first, with the
// Options of the Configurator. It returns what it did; an empty string means that there was nothing to do.
func Recover(opt Options) (did string, err error) {
	opt = opt.withDefaults()
	j := &journal{path: opt.ResolvConf, dir: opt.StateDir}
	if _, err := os.Stat(j.file()); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err := ownDirectory(j.dir); err != nil {
		return "", err
	}
	err = j.acquire()
	if errors.Is(err, errBusy) {
		return "", nil // the process that edited it still runs
	}
	if err != nil {
		return "", err
	}
	defer j.release()
	switch err := j.undo(); {
	case left(err):
		return err.Error(), nil
	case err != nil:
		return "", err
	}
	return "restored " + j.path + ", which a kubevpn process edited before it died", nil
}

// Remove is Recover for the last time: it also removes the directory of the journal, if nothing else is in it and no
// Configurator has edited the file.
func Remove(opt Options) error {
	if _, err := Recover(opt); err != nil {
		return err
	}
	opt = opt.withDefaults()
	j := &journal{dir: opt.StateDir}
	if _, err := os.Stat(j.file()); err == nil {
		return nil
	}
	_ = os.Remove(j.lockFile()) // it may not exist
	_ = os.Remove(opt.StateDir)
	return nil
}

// reconcile carries out the current plan. The caller holds mu.
func (c *Configurator) reconcile(force bool) error {
	c.seen, c.fresh = c.look(), seen{}
	e := c.observe()
	for {
		d, err := plan(e)
		if err == nil {
			err = c.enact(d, force)
		}
		if err != nil && d.Mode == ModeResolved && e.Resolved == nil {
			e.Resolved = err // for example a link that another program manages: use the next method
			continue
		}
		c.failed = err != nil
		return err
	}
}

func (c *Configurator) observe() env {
	e := env{Config: c.cfg, ResolvConfPath: c.opt.ResolvConf}
	content, foreign, err := c.journal.original()
	if err != nil {
		c.opt.Logger.Warn("reading resolv.conf", "path", c.opt.ResolvConf, "error", err)
	}
	e.ResolvConf = content
	if foreign && c.decision.Mode == ModeFile {
		c.tramples++
	}
	if target, err := filepath.EvalSymlinks(c.opt.ResolvConf); err == nil {
		e.ResolvConfPath = target
	}
	if c.resolved == nil || !c.resolved.conn.Connected() {
		c.resolved, e.Resolved = openResolved(c.opt.Bus)
	}
	if e.Resolved == nil {
		e.Resolved = c.resolved.running()
	}
	if b, err := os.ReadFile(uplinks); err == nil {
		e.ResolvedUplinks = nameservers(b)
	}
	if c.table == nil {
		c.table, e.NFTables = c.openTable(c.opt.Table)
	}
	return e
}

func (c *Configurator) closeBus() error {
	if c.resolved == nil {
		return nil
	}
	err := c.resolved.close()
	c.resolved = nil
	return err
}

func (c *Configurator) closeTable() error {
	if c.table == nil {
		return nil
	}
	err := c.table.Close()
	c.table = nil
	return err
}

// watch reconciles when the machine changes, until ctx ends.
func (c *Configurator) watch(ctx context.Context) {
	tick := time.NewTimer(c.poll)
	defer tick.Stop()
	for {
		force := false
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case s, open := <-c.busSignals():
			if !open {
				c.dropBus()
				continue
			}
			force = isNewOwner(s)
		}
		applied, changed, settling := c.follow(ctx, force)
		if changed {
			c.opt.OnChange(applied)
		}
		if settling {
			tick.Reset(min(c.poll, settleInterval))
		} else {
			tick.Reset(c.poll)
		}
	}
}

// follow reconciles if something has changed. It reports whether the result differs, or whether to try again soon
// because a program is writing a file.
func (c *Configurator) follow(ctx context.Context, force bool) (applied Applied, changed, settling bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ctx.Err() != nil {
		return Applied{}, false, false
	}
	before := c.applied
	if now := c.look(); now != c.seen && now != c.fresh {
		c.fresh, c.failed = now, c.failed || force
		return before, false, true
	} else if now == c.seen && !force && !c.failed && (!c.decision.PerLink || c.inForce()) {
		return before, false, false
	}
	if err := c.reconcile(force); err != nil {
		c.opt.Logger.Error("following a change of the machine's DNS", "error", err)
		c.applied.Warnings = []string{fmt.Sprintf("following a change of the machine's DNS: %v", err)}
	}
	return c.applied, !reflect.DeepEqual(before, c.applied), false
}

// inForce reports whether systemd-resolved runs and still has the links' settings.
func (c *Configurator) inForce() bool {
	return c.resolved != nil && c.resolved.running() == nil && c.resolved.inForce(c.cfg.Links)
}

func (c *Configurator) busSignals() <-chan *dbus.Signal {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resolved == nil {
		return nil
	}
	return c.resolved.signals
}

// dropBus closes a broken bus connection. The next tick connects again if resolved was in use.
func (c *Configurator) dropBus() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resolved != nil {
		c.resolved.conn.Close() // it has failed already; this ends its goroutines
		c.resolved = nil
		c.failed = c.decision.PerLink
	}
}

// isNewOwner reports whether resolved has just started.
func isNewOwner(s *dbus.Signal) bool {
	if s.Name != "org.freedesktop.DBus.NameOwnerChanged" || len(s.Body) != 3 {
		return false
	}
	owner, _ := s.Body[2].(string)
	return owner != ""
}
