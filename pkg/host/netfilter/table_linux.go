package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kubevpn/pkg/host/unixsocket"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// flagOwner is NFT_TABLE_F_OWNER of nf_tables.h, Linux 5.12: the table belongs to the socket that made it.
const flagOwner = 0x2

// Table is an nftables table of the inet family that ends with its process: the kernel removes it when the socket that
// created it closes, however the process ends, and lets no other socket change it. It is empty at first, and belongs to
// the network namespace of the thread that opened it. Like its Conn it is for one goroutine at a time.
type Table struct {
	// Conn is the connection whose socket owns the table. Changes take effect with Flush: all at once or, after an
	// error, none.
	*nftables.Conn
	table    *nftables.Table
	socket   *netlink.Conn
	inFlight int // a file descriptor: see outliveSockets
}

// OpenTable creates a table. It needs Linux 5.12 and CAP_NET_ADMIN; an error says which is missing, or that another
// process owns a table of that name.
func OpenTable(name string) (t *Table, err error) {
	// The library has no owner flag, so the table is made by hand on the library's own socket: the kernel takes
	// the chains and rules of an owner's table from the socket that made it, and from no other.
	t = &Table{table: &nftables.Table{Name: name, Family: nftables.TableFamilyINet}, inFlight: -1}
	t.Conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		t.socket = c
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	err = t.send(unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Excl, []netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: zeroTerminated(name)},
		{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, flagOwner)},
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cannot create the nftables table %s: %s: %w", name, t.reason(err), err),
			t.Close())
	}
	if err := t.outliveSockets(); err != nil {
		return nil, errors.Join(fmt.Errorf("cannot keep the nftables table %s until the process ends: %w", name, err),
			t.Close())
	}
	return t, nil
}

// reason explains why the kernel refused to create the table.
func (t *Table) reason(err error) string {
	if !errors.Is(err, unix.EPERM) {
		return fmt.Sprintf("a table with an owner needs Linux 5.12 with nf_tables, and this is %s", kernelRelease())
	}
	if _, err := t.ListTablesOfFamily(nftables.TableFamilyINet); err != nil {
		return "the capability NET_ADMIN is missing"
	}
	return "another process owns it"
}

// kernelRelease returns what `uname -r` prints.
func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "an unknown kernel"
	}
	return unix.ByteSliceToString(name.Release[:])
}

// outliveSockets makes the table outlive all other sockets of a process that is killed. The kernel needs the table
// while it closes them: the end of a connection finds the peer by the connection's NAT, and the removal of the last
// table with NAT removes the NAT of all connections. The kernel closes files in an order that depends on their
// numbers, but a file that is in flight in a message to a socket only after the others. So outliveSockets sends the
// table's socket to a socket that never reads.
func (t *Table) outliveSockets() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	t.inFlight = pair[1]
	err = unixsocket.Control(t.socket, func(fd int) error {
		return unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0)
	})
	return errors.Join(err, unix.Close(pair[0]))
}

// Close closes the socket, with which the kernel removes the table and its contents. A second Close does nothing.
func (t *Table) Close() error {
	err := t.CloseLasting()
	if t.inFlight >= 0 {
		err = errors.Join(err, unix.Close(t.inFlight))
		t.inFlight = -1
	}
	return err
}

// Table returns the table; each set must name its table.
func (t *Table) Table() *nftables.Table { return t.table }

// Chain adds a base chain.
func (t *Table) Chain(name string, kind nftables.ChainType, hook *nftables.ChainHook,
	priority nftables.ChainPriority) *nftables.Chain {
	return t.AddChain(&nftables.Chain{Name: name, Table: t.table, Type: kind, Hooknum: hook, Priority: &priority})
}

// Rule adds a rule, which consists of these parts, to the end of a chain.
func (t *Table) Rule(c *nftables.Chain, parts ...[]expr.Any) {
	t.AddRule(&nftables.Rule{Table: t.table, Chain: c, Exprs: slices.Concat(parts...)})
}

// MarshaledRule adds a rule to the end of an existing chain, without waiting for Flush. It is for expressions that the
// library lacks.
func (t *Table) MarshaledRule(c *nftables.Chain, exprs ...[]byte) error {
	var list []netlink.Attribute
	for _, e := range exprs {
		list = append(list, netlink.Attribute{Type: unix.NLA_F_NESTED | unix.NFTA_LIST_ELEM, Data: e})
	}
	data, err := netlink.MarshalAttributes(list)
	if err != nil {
		return err
	}
	return t.send(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, []netlink.Attribute{
		{Type: unix.NFTA_RULE_TABLE, Data: zeroTerminated(t.table.Name)},
		{Type: unix.NFTA_RULE_CHAIN, Data: zeroTerminated(c.Name)},
		{Type: unix.NLA_F_NESTED | unix.NFTA_RULE_EXPRESSIONS, Data: data},
	})
}

// Others lists the tables beside this one whose names begin with prefix and are longer.
func (t *Table) Others(prefix string) ([]string, error) {
	tables, err := t.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, other := range tables {
		if other.Name != t.table.Name && len(other.Name) > len(prefix) && strings.HasPrefix(other.Name, prefix) {
			out = append(out, other.Name)
		}
	}
	return out, nil
}

// send sends one message as a batch of its own, and waits for the kernel's answer.
func (t *Table) send(kind netlink.HeaderType, flags netlink.HeaderFlags, attrs []netlink.Attribute) error {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		return err
	}
	// nfgenmsg: family, version, resource id (big endian).
	header := func(family byte, id uint16) []byte { return binary.BigEndian.AppendUint16([]byte{family, 0}, id) }
	batch := func(kind netlink.HeaderType) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: kind, Flags: netlink.Request},
			Data:   header(unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES),
		}
	}
	_, err = t.socket.SendMessages([]netlink.Message{
		batch(unix.NFNL_MSG_BATCH_BEGIN),
		{
			Header: netlink.Header{
				Type:  unix.NFNL_SUBSYS_NFTABLES<<8 | kind,
				Flags: netlink.Request | netlink.Acknowledge | flags,
			},
			Data: append(header(unix.NFPROTO_INET, 0), data...),
		},
		batch(unix.NFNL_MSG_BATCH_END),
	})
	if err != nil {
		return err
	}
	_, err = t.socket.Receive()
	return err
}

func zeroTerminated(s string) []byte { return append([]byte(s), 0) }
