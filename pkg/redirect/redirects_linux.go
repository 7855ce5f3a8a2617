package redirect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"
)

// backend is how the kernel is told. Redirects calls one with its lock held.
type backend interface {
	fmt.Stringer
	set(map[Port]uint16) error
	// divert has answers to what DialFrom opens come back to us, if there is a route.
	divert() error
	close() error
}

// leased is a backend whose redirects end unless they are renewed.
type leased interface {
	renew() error
}

// Redirects are ports of applications whose connections go to other ports. Its methods may be called from several goroutines.
type Redirects struct {
	mark      uint32
	diversion diversion
	logger    *slog.Logger

	mu      sync.Mutex // guards backend
	backend backend    // nil: closed

	keeping        sync.RWMutex        // guards those below: who dials does not wait for the kernel
	local4, local6 map[netip.Addr]bool // addresses to which DialFrom keeps the client's address
}

// New has nothing redirected as yet, but proves that the kernel can. An error says what is missing. It takes over what an
// earlier process of the same Mark has left, and waits for the table of one that is ending.
func New(cfg Config) (*Redirects, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if err := removeChains(cfg, func(string) bool { return true }); err != nil {
		cfg.Logger.Warn("an earlier process may have left rules of iptables; ours come before them", "error", err)
	}
	b, err := openBackend(cfg)
	if err != nil {
		return nil, err
	}
	cfg.Logger.Info("redirects are possible", "with", b)
	return &Redirects{mark: cfg.Mark, diversion: diversionOf(cfg.Mark), logger: cfg.Logger, backend: b}, nil
}

func openBackend(cfg Config) (backend, error) {
	switch cfg.Backend {
	case NFTables:
		return openOwnerTable(cfg)
	case IPTables:
		return openRules(cfg)
	case "":
	default:
		return nil, fmt.Errorf("redirecting by %q: there is no such backend", cfg.Backend)
	}
	table, err := openOwnerTable(cfg)
	switch {
	case err == nil:
		return table, nil
	case errors.Is(err, os.ErrPermission) || cfg.Programs == "": // more would take no less
		return nil, err
	}
	cfg.Logger.Info("the kernel has no tables that end with a process: iptables instead", "why", err)
	rules, rulesErr := openRules(cfg)
	if rulesErr != nil {
		return nil, errors.Join(err, rulesErr)
	}
	return rules, nil
}

// Owned is nil if the redirects that New makes go with the process, however it ends, and if New can make none. Else it says why
// they do not: somebody who outlives the process has to call Remove.
func Owned(cfg Config) error {
	if cfg.Backend == IPTables {
		return errors.New("iptables is what was asked for")
	}
	table, err := openOwnerTable(cfg)
	switch {
	case err == nil:
		return table.close()
	case cfg.Backend == NFTables || cfg.Programs == "" || errors.Is(err, os.ErrPermission):
		return nil
	}
	return err
}

// Remove removes what a process with this Config has left, which has ended. Where there is nothing it does nothing. UDP flows
// that were redirected go to the application with their next datagram.
func Remove(cfg Config) error {
	return removeChains(cfg, func(name string) bool { return name == chainName(cfg) })
}

// Set says which ports are redirected, and to which local ports: whoever listens there does so at all addresses, in both
// families. Each connection meets what was set before or what is set now, nothing in between. A TCP connection that is open
// stays where it is. A UDP flow that began between New and the redirect of its port stays with the application, one of which
// the kernel did not know before counts as new, and one that is redirected goes with its port: back, or to another local port.
// UDP ports need local ports of their own. Run has to be running.
func (r *Redirects) Set(ports map[Port]uint16) error {
	if err := validate(ports); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.backend == nil {
		return os.ErrClosed
	}
	if err := r.backend.set(ports); err != nil {
		return fmt.Errorf("redirecting %v: %w", ports, err)
	}
	r.logger.Info("ports are redirected", "ports", fmt.Sprint(ports))
	return nil
}

// Run keeps redirects alive until ctx ends; those of nftables live by themselves. What fails is tried again: meanwhile, new
// connections go to the application.
func (r *Redirects) Run(ctx context.Context) {
	if !r.leased() {
		<-ctx.Done()
		return
	}
	tick := time.NewTicker(renewal)
	defer tick.Stop()
	failed := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C: // by the monotonic clock, whatever is done to the other one
		}
		err := r.renew()
		switch {
		case err != nil && !failed:
			r.logger.Error("renewing redirects", "error", err)
		case err == nil && failed:
			r.logger.Info("redirects are renewed again")
		}
		failed = err != nil
	}
}

func (r *Redirects) leased() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, is := r.backend.(leased)
	return is
}

func (r *Redirects) renew() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l, ok := r.backend.(leased); ok {
		return l.renew()
	}
	return nil
}

// Close gives every port back, and removes what is left besides. Close redirected connections first: once nobody does NAT in
// the namespace any more, the kernel does not know whose they are. A second Close does nothing.
func (r *Redirects) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.backend == nil {
		return nil
	}
	err := r.backend.close()
	r.backend = nil
	r.keep(&r.local4, nil)
	r.keep(&r.local6, nil)
	return err
}
