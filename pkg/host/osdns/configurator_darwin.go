package osdns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

func defaultTable() string { return "" }

// Configurator keeps a file in /etc/resolver for each domain of the last Set. Programs ask kubevpn's resolver for names
// under these domains, and for no others. Its methods are safe for concurrent use.
type Configurator struct {
	opt Options
	mu  sync.Mutex
}

// New returns a Configurator that has configured nothing. It does no I/O.
func New(opt Options) *Configurator { return &Configurator{opt: opt.withDefaults()} }

// Set replaces the files with those of cfg.
func (c *Configurator) Set(cfg Config) (Applied, error) {
	if err := cfg.validate(); err != nil {
		return Applied{}, err
	}
	if cfg.zero() {
		return Applied{}, c.Close()
	}
	server := cfg.Listen4
	if !server.IsValid() {
		server = cfg.Listen6
	}
	if !server.IsValid() {
		return Applied{}, errors.New("the resolver listens nowhere")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	warnings, err := ownFiles(c.opt).set(cfg.matchDomains(), server)
	if err != nil {
		return Applied{}, err
	}
	return Applied{Mode: ModeDarwin, Warnings: warnings}, nil
}

// Close removes the files.
func (c *Configurator) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := ownFiles(c.opt).set(nil, netip.AddrPort{})
	return err
}

// Recover removes the files of processes that ended without Close.
func Recover(opt Options) (did string, err error) {
	n, err := ownFiles(opt.withDefaults()).recover()
	if n > 0 {
		did = fmt.Sprintf("removed %d files of dead kubevpn processes from %s", n, opt.withDefaults().ResolverDir)
	}
	return did, err
}

func ownFiles(opt Options) resolverDir {
	return resolverDir{dir: opt.ResolverDir, pid: os.Getpid(), alive: func(pid int) bool {
		return !errors.Is(unix.Kill(pid, 0), unix.ESRCH)
	}}
}
