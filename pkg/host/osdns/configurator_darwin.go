package osdns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Configurator keeps a file in /etc/resolver for each domain of the last Set. Programs ask kubevpn's resolver for names
// under these domains, and for no others. Its methods are safe for concurrent use.
type Configurator struct{ mu sync.Mutex }

// New returns a Configurator that has configured nothing. It does no I/O.
func New(Options) *Configurator { return new(Configurator) }

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
	warnings, err := ownFiles().set(cfg.matchDomains(), server)
	if err != nil {
		return Applied{}, err
	}
	return Applied{Mode: ModeDarwin, Warnings: warnings}, nil
}

// Close removes the files.
func (c *Configurator) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := ownFiles().set(nil, netip.AddrPort{})
	return err
}

// Recover removes the files of processes that ended without Close.
func Recover(Options) (did string, err error) {
	files := ownFiles()
	n, err := files.recover()
	if n > 0 {
		did = fmt.Sprintf("removed %d files of dead kubevpn processes from %s", n, files.dir)
	}
	return did, err
}

func ownFiles() resolverDir {
	return resolverDir{dir: "/etc/resolver", pid: os.Getpid(), alive: func(pid int) bool {
		return !errors.Is(unix.Kill(pid, 0), unix.ESRCH)
	}}
}
