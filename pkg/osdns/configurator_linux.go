package osdns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// tablePrefix begins the name of every table of ours.
const tablePrefix = "kubevpn-"

func defaultTable() string { return fmt.Sprintf("%s%d", tablePrefix, os.Getpid()) }

// pollInterval is how often resolv.conf is looked at. It is replaced by rename, often behind several
// symlinks, which inotify follows badly; a stat every two seconds costs nothing.
const pollInterval = 2 * time.Second

// settleInterval is how long a changed resolv.conf must stay as it is before it counts: others write it in
// place, empty at first.
const settleInterval = 100 * time.Millisecond

// maxTramples is how often resolv.conf is edited again after another program rewrote it.
const maxTramples = 10

// uplinks is the list of servers that systemd-resolved asks, in the form of a resolv.conf.
const uplinks = "/run/systemd/resolve/resolv.conf"

// Configurator keeps the resolver in the path of this machine's DNS queries as the last Set said. Its
// methods may be called from several goroutines. It acts on the network and mount namespace of the process.
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
	table    *ownerTable // open while it has rules, or while a Set looks whether it can be had
	resolved *resolved
	journal  *journal
	tramples int
	gaveUp   bool // on resolv.conf, to a program that keeps rewriting it
	seen     seen // by the last reconcile
	fresh    seen // by the last look that saw something else
	failed   bool // the last reconcile; the next tick tries again

	stop    context.CancelFunc // of the watcher; nil: none runs
	stopped chan struct{}
}

// seen is what the last reconcile saw of the files that it depends on.
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

// Set makes name resolution what cfg says and reports how. It may be called again with the same cfg. After
// an error the machine's DNS may be between the old and the new state; a later Set goes on from there.
//
// While a Config is set, a goroutine follows changes of resolv.conf and of systemd-resolved; Close, or the
// zero Config, ends it.
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
	if err == nil && c.stop == nil {
		ctx, cancel := context.WithCancel(context.Background())
		c.stop, c.stopped = cancel, make(chan struct{})
		go c.watch(ctx, c.stopped)
	}
	return c.applied, err
}

// Close makes name resolution what it was before the first Set. The Configurator may be used again.
func (c *Configurator) Close() error {
	c.mu.Lock()
	stop, stopped := c.stop, c.stopped
	c.stop = nil
	c.mu.Unlock()
	if stop != nil {
		stop()
		<-stopped
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg, c.applied = Config{}, Applied{}
	err := errors.Join(c.closeJournal(), c.closeTable(), c.closeBus())
	c.forget(c.decision.Redirect)
	c.decision = decision{}
	return err
}

// Recover undoes the edit of resolv.conf that a process which died has left, if there is one. It is called
// before anything else is done, with the Options of a Configurator. A nil error and an empty string mean
// that there was nothing to do.
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
		return "", nil // its owner lives
	}
	if err != nil {
		return "", err
	}
	defer j.release()
	switch err := j.undo(); {
	case errors.Is(err, errForeign):
		return err.Error(), nil
	case err != nil:
		return "", err
	}
	return "put " + j.path + " back, which a kubevpn process that died had edited", nil
}

// reconcile brings the machine to what plan says now. The caller holds mu.
func (c *Configurator) reconcile(force bool) error {
	c.seen, c.fresh = c.look(), seen{}
	e := c.observe()
	for {
		d, err := plan(e)
		if err == nil {
			err = c.enact(d, force)
		}
		if err != nil && d.Mode == ModeResolved && e.Resolved == nil {
			e.Resolved = err // a link that another program manages, for instance: the next best way
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
	if e.Resolved = c.openBus(); e.Resolved == nil {
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

func (c *Configurator) openBus() (err error) {
	if c.resolved == nil || !c.resolved.conn.Connected() {
		c.resolved, err = openResolved(c.opt.Bus)
	}
	return err
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

// watch follows the surroundings until ctx ends.
func (c *Configurator) watch(ctx context.Context, stopped chan<- struct{}) {
	defer close(stopped)
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

// follow reconciles if something has changed, and reports whether other things apply now, or whether to come
// back soon because a file is being written.
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

// inForce reports that systemd-resolved runs and has our settings still.
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

// dropBus forgets a bus that has gone; the next tick connects again if resolved was in use.
func (c *Configurator) dropBus() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resolved != nil {
		c.resolved.conn.Close() // it has failed already; this ends its goroutines
		c.resolved = nil
		c.failed = c.decision.PerLink
	}
}

// isNewOwner reports that resolved has just started.
func isNewOwner(s *dbus.Signal) bool {
	if s.Name != "org.freedesktop.DBus.NameOwnerChanged" || len(s.Body) != 3 {
		return false
	}
	owner, _ := s.Body[2].(string)
	return owner != ""
}
