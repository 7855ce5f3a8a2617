package redirect

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"kubevpn/pkg/host/netfilter"

	"github.com/google/nftables"
)

// Redirects sends connections for ports of applications to other ports. Its methods are safe for concurrent use.
type Redirects struct {
	mark      uint32
	diversion diversion
	logger    *slog.Logger

	mu                sync.Mutex       // guards table and its contents
	table             *netfilter.Table // nil: closed
	tcp, udp, udpBack *nftables.Set
	output            *nftables.Chain
	diverts           bool // the table has the rules of divert

	kept atomic.Pointer[map[netip.Addr]bool] // addresses to which Dial keeps the client's address; nil: none
}

// New redirects nothing yet, but proves that the kernel can. An error says what is missing.
func New(cfg Config) (*Redirects, error) {
	table, err := netfilter.OpenTable(cfg.Name)
	if err != nil {
		return nil, err
	}
	r := &Redirects{
		mark: cfg.Mark, diversion: diversion(cfg.Mark + 1), table: table,
		logger: cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler)),
	}
	if err := r.addRules(cfg); err != nil {
		err = fmt.Errorf("cannot create the chains of a redirect (nf_tables with nat, fib and ct): %w", err)
		return nil, errors.Join(err, table.Close())
	}
	return r, nil
}

// Set replaces the ports that are redirected, each with its local port. A server there listens at all addresses, in
// both families. Each new connection uses either the previous ports or the new ones. An open TCP connection keeps its
// destination. A UDP flow that began between New and the redirect of its port stays with the application; one that the
// kernel did not track before counts as new. A redirected UDP flow follows its port: back to the application, or to
// another local port. UDP ports need local ports of their own.
func (r *Redirects) Set(ports map[Port]uint16) error {
	if err := validate(ports); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		return os.ErrClosed
	}
	if err := r.setMaps(ports); err != nil {
		return fmt.Errorf("cannot redirect %v: %w", ports, err)
	}
	r.logger.Info("redirected ports", "ports", fmt.Sprint(ports))
	return nil
}

// Close gives every port back to its application, and removes everything else. Close redirected connections first:
// without NAT in the namespace, the kernel cannot tell to which connections their packets belong. A second Close does
// nothing.
func (r *Redirects) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		return nil
	}
	err := errors.Join(r.table.Close(), r.diversion.removeRoutes())
	r.table = nil
	r.kept.Store(nil)
	return err
}
