package netfilter

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// Available returns why this process cannot create a Table, or nil. It requires CAP_NET_ADMIN, and creates nothing:
// OpenTable can still find that the kernel is older than 5.12.
func Available() (err error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	defer func() { err = errors.Join(err, conn.CloseLasting()) }()
	switch _, err := conn.ListTablesOfFamily(nftables.TableFamilyINet); {
	case errors.Is(err, unix.EPERM):
		return errors.New("the capability NET_ADMIN is missing")
	case err != nil:
		return fmt.Errorf("Linux %s has no nf_tables: %w", kernelRelease(), err)
	}
	return nil
}
