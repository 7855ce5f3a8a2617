package osdns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	nl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tableFlagOwner is NFT_TABLE_F_OWNER of nf_tables.h, Linux 5.12: the table belongs to the socket that made
// it, nobody else can change it, and the kernel removes it when that socket closes.
const tableFlagOwner = 0x2

// natPriority puts our redirect before everybody else's destination NAT (-100): Docker's, for one, which
// redirects its own resolver at 127.0.0.11. The first to set up NAT for a flow wins.
const natPriority = -110

// ownerTable is a table of ours in the kernel, empty at first:
//
//	table inet kubevpn-UID-PID { flags owner
//	  chain redirect { type nat hook output priority -110
//	    meta mark MARK return                                        # the resolver's own queries
//	    ip daddr NAMESERVER udp dport 53 dnat ip to LISTEN4          # and tcp; and for IPv6
//	  }
//	  chain guard { type filter hook input priority filter
//	    iifname != { lo, LINK } ip daddr ADDR drop                   # CVE-2019-14899
//	  }
//	}
type ownerTable struct {
	conn     *nftables.Conn
	table    *nftables.Table
	redirect *nftables.Chain
	guard    *nftables.Chain
}

// openTable makes the table. An error says what the machine lacks.
func openTable(name string) (t *ownerTable, err error) {
	// The library has no owner flag, so the table is made by hand on the library's own socket: the kernel takes
	// the chains and rules of an owner's table from the socket that made it, and from no other.
	var socket *netlink.Conn
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		socket = c
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.CloseLasting())
		}
	}()
	if err := createOwned(socket, name); err != nil {
		return nil, fmt.Errorf("making a table with an owner (Linux 5.12 or newer): %w", err)
	}
	table := &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
	t = &ownerTable{conn: conn, table: table}
	t.redirect = conn.AddChain(&nftables.Chain{
		Name: "redirect", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(natPriority),
	})
	t.guard = conn.AddChain(&nftables.Chain{
		Name: "guard", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	// A rule that matches nothing shows whether the kernel has the expressions that the real ones need.
	t.addRedirect(netip.AddrFrom4([4]byte{255, 255, 255, 255}), netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 53))
	if err := conn.Flush(); err != nil {
		return nil, fmt.Errorf("making a nat chain: %w", err)
	}
	return t, nil
}

func createOwned(socket *netlink.Conn, name string) error {
	flags := binary.BigEndian.AppendUint32(nil, tableFlagOwner)
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(name), 0)},
		{Type: unix.NFTA_TABLE_FLAGS, Data: flags},
	})
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
	_, err = socket.SendMessages([]netlink.Message{
		batch(unix.NFNL_MSG_BATCH_BEGIN),
		{
			Header: netlink.Header{
				Type:  unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE,
				Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl,
			},
			Data: append(header(unix.NFPROTO_INET, 0), attrs...),
		},
		batch(unix.NFNL_MSG_BATCH_END),
	})
	if err != nil {
		return err
	}
	_, err = socket.Receive()
	return err
}

// redirection is what the table shall do; the zero value is nothing.
type redirection struct {
	mark        uint32
	nameservers []netip.Addr // without zones
	to4, to6    netip.AddrPort
	links       []Link // whose addresses are guarded
}

// set replaces all rules in one transaction: no packet sees the table half done.
func (t *ownerTable) set(r redirection) error {
	t.conn.FlushChain(t.redirect)
	t.conn.FlushChain(t.guard)
	if len(r.nameservers) > 0 {
		t.rule(t.redirect,
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			equal(binaryutil.NativeEndian.PutUint32(r.mark)),
			&expr.Verdict{Kind: expr.VerdictReturn})
	}
	for _, ns := range r.nameservers {
		to := r.to4
		if ns.Is6() {
			to = r.to6
		}
		t.addRedirect(ns, to)
	}
	for _, l := range r.links {
		for _, a := range l.Addrs {
			t.rule(t.guard, join(
				[]expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, notEqual(linkName("lo"))},
				[]expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, notEqual(linkName(l.Name))},
				destinationIs(a),
				[]expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}})...)
		}
	}
	return t.conn.Flush()
}

// close removes the table: the kernel does.
func (t *ownerTable) close() error { return t.conn.CloseLasting() }

func (t *ownerTable) addRedirect(ns netip.Addr, to netip.AddrPort) {
	family := uint32(unix.NFPROTO_IPV4)
	if to.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		t.rule(t.redirect, join(
			destinationIs(ns),
			[]expr.Any{
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal([]byte{proto}),
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
				equal([]byte{0, 53}),
				&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
				&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: 1, RegProtoMin: 2},
			})...)
	}
}

func (t *ownerTable) rule(c *nftables.Chain, exprs ...expr.Any) {
	t.conn.AddRule(&nftables.Rule{Table: t.table, Chain: c, Exprs: exprs})
}

func destinationIs(a netip.Addr) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16) // RFC 791
	if a.Is6() {
		family, offset = unix.NFPROTO_IPV6, 24 // RFC 8200
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, equal([]byte{family}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
		equal(a.AsSlice()),
	}
}

func equal(data []byte) *expr.Cmp    { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }
func notEqual(data []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data} }

// linkName is a name as the kernel compares it: padded to IFNAMSIZ.
func linkName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func join(parts ...[]expr.Any) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// otherTables are the tables of other kubevpn processes.
func (t *ownerTable) others(prefix string) ([]string, error) {
	tables, err := t.conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, other := range tables {
		if other.Name != t.table.Name && len(other.Name) > len(prefix) && other.Name[:len(prefix)] == prefix {
			out = append(out, other.Name)
		}
	}
	return out, nil
}

// forgetFlows deletes the kernel's memory of UDP flows towards port 53 of these nameservers. A program that
// keeps one socket for its queries (c-ares does) would otherwise go on where its first packet went. Where the
// kernel cannot list flows there is nothing to do about it: such flows end 30 s after their last packet.
func forgetFlows(nameservers []netip.Addr) error {
	var errs []error
	for _, family := range []nl.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := nl.ConntrackDeleteFilters(nl.ConntrackTable, family, flowsTo(nameservers)); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

type flowsTo []netip.Addr

func (f flowsTo) MatchConntrackFlow(flow *nl.ConntrackFlow) bool {
	if flow.Forward.Protocol != unix.IPPROTO_UDP || flow.Forward.DstPort != 53 {
		return false
	}
	dst, ok := netip.AddrFromSlice(flow.Forward.DstIP)
	if !ok {
		return false
	}
	for _, a := range f {
		if a.WithZone("") == dst.Unmap() {
			return true
		}
	}
	return false
}
