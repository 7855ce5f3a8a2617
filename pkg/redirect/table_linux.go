package redirect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	nlattr "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/ownertable"
)

// Connections are tracked (-200) before both.
const (
	// tcpPriority puts our redirect behind everybody else's destination NAT (-100): the first to set up NAT for a connection
	// wins. Who has one in the pod, a service mesh for one, means what comes to be for him first: we would get what only he can
	// read, and bring past him what he would not let through.
	tcpPriority = -90
	// udpPriority is before them: our rewriting is no NAT, and the ports are those of the packet as it came.
	udpPriority = -110
)

// ctConfirmed is IPS_CONFIRMED of nf_conntrack_common.h: a packet of the flow has arrived before.
const ctConfirmed = 1 << 3

// ownerTable is the backend of Linux 5.12 and newer. It is this table:
//
//	table inet NAME { flags owner
//	  map tcp { type inet_service : inet_service }             # port → local port
//	  map udp { type inet_service : inet_service }
//	  map udp-back { type inet_service : inet_service }        # local port → port
//
//	  chain tcp { type nat hook prerouting priority -90
//	    iifname != "lo" fib daddr type local tcp flags & (fin|syn|rst|ack) == syn dnat to :tcp dport map @tcp
//	  }
//	  chain udp { type filter hook prerouting priority -110
//	    iifname != "lo" fib daddr type local udp dport map @udp-back drop
//	    iifname != "lo" fib daddr type local udp dport map @udp ct status ! confirmed ct mark set MARK
//	    ct mark MARK udp dport set udp dport map @udp
//	  }
//	  chain output { type filter hook output priority raw
//	    udp sport set udp sport map @udp-back
//	  }
//	}
//
// and, with Transparent, what is told there.
//
// Only a SYN is redirected, as conntrack may begin with this table: then a connection that is older looks new to it.
//
// A local port is nobody's but the redirect's: a datagram that was sent to it would be taken for one that was redirected. (A TCP
// connection says where it was for, OriginalDestination.)
//
// UDP has no NAT, as NAT would outlive the table: conntrack keeps it for as long as the client goes on sending, to a port where
// nobody is any more. So the table says which flows are redirected (those that began since, by conntrack's mark) and the ports
// are rewritten packet by packet, outside of what conntrack sees.
type ownerTable struct {
	mark      uint32
	diversion diversion
	logger    *slog.Logger

	table             *ownertable.Table
	tcp, udp, udpBack *nftables.Set
	output            *nftables.Chain
	diverts           bool // the rules of divert are there
}

// openOwnerTable makes the table, empty as yet, and so proves that the kernel can redirect.
func openOwnerTable(cfg Config) (*ownerTable, error) {
	table, err := openTable(cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("the table %s: %w", cfg.Name, err)
	}
	o := &ownerTable{mark: cfg.Mark, diversion: diversionOf(cfg.Mark), logger: cfg.Logger, table: table}
	if err := o.build(); err != nil {
		return nil, errors.Join(fmt.Errorf("making the chains of a redirect (nf_tables with nat, fib and ct): %w", err), table.Close())
	}
	return o, nil
}

func (o *ownerTable) String() string { return "nftables" }

// endingTimeout is how long a process that was killed may take to end. Its table is the last of it that goes.
const endingTimeout = time.Second

func openTable(name string) (*ownertable.Table, error) {
	for began := time.Now(); ; {
		table, err := ownertable.Open(name)
		if !errors.Is(err, os.ErrPermission) {
			return table, err
		}
		switch taken, listErr := tableExists(name); {
		case listErr != nil: // that, too, takes the capability
			return nil, fmt.Errorf("it takes the capability NET_ADMIN: %w", err)
		case time.Since(began) < endingTimeout: // nothing tells when
			time.Sleep(2 * time.Millisecond)
		case taken:
			return nil, fmt.Errorf("somebody else has it: %w", err)
		default:
			return nil, err
		}
	}
}

func tableExists(name string) (bool, error) {
	conn, err := nftables.New()
	if err != nil {
		return false, err
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == name }), err
}

func (o *ownerTable) build() error {
	for _, m := range []struct {
		name string
		set  **nftables.Set
	}{{"tcp", &o.tcp}, {"udp", &o.udp}, {"udp-back", &o.udpBack}} {
		*m.set = &nftables.Set{
			Table: o.table.Table(), Name: m.name, IsMap: true,
			KeyType: nftables.TypeInetService, DataType: nftables.TypeInetService, KeyByteOrder: binaryutil.BigEndian,
		}
		if err := o.table.AddSet(*m.set, nil); err != nil {
			return err
		}
	}
	t := o.table
	fromOutside := ownertable.Join(
		ownertable.IsNot(expr.MetaKeyIIFNAME, ownertable.Link("lo")),
		[]expr.Any{
			&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			ownertable.Equal(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)),
		})
	tcp := t.Chain("tcp", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, tcpPriority)
	t.Rule(tcp, ownertable.Join(
		fromOutside,
		ownertable.Is(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}),
		[]expr.Any{
			load(13, 1),
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0}},
			ownertable.Equal([]byte{syn}),
		},
		mapped(destinationPort, o.tcp),
		[]expr.Any{&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_INET, RegProtoMin: 2}})...)

	udp := t.Chain("udp", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, udpPriority)
	isUDP := ownertable.Is(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP})
	t.Rule(udp, ownertable.Join(fromOutside, isUDP, mapped(destinationPort, o.udpBack), ownertable.Verdict(expr.VerdictDrop))...)
	t.Rule(udp, ownertable.Join(
		fromOutside, isUDP,
		[]expr.Any{
			&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
			&expr.Bitwise{
				SourceRegister: 1, DestRegister: 1, Len: 4,
				Mask: binaryutil.NativeEndian.PutUint32(ctConfirmed), Xor: make([]byte, 4),
			},
			ownertable.Equal(make([]byte, 4)),
		},
		mapped(destinationPort, o.udp),
		setCtMark(o.mark))...)
	ours := ownertable.Join(isUDP, ctMarkIs(o.mark))
	// A datagram whose sender left the checksum out has none afterwards either.
	t.Rule(udp, ownertable.Join(
		ours,
		[]expr.Any{load(udpChecksum, 2), ownertable.Equal([]byte{0, 0})},
		mapped(destinationPort, o.udp),
		[]expr.Any{rewrite(destinationPort, expr.CsumTypeNone)},
		ownertable.Verdict(expr.VerdictAccept))...)
	t.Rule(udp, ownertable.Join(ours, mapped(destinationPort, o.udp), []expr.Any{rewrite(destinationPort, expr.CsumTypeInet)})...)

	o.output = t.Chain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityRaw)
	t.Rule(o.output, ownertable.Join(isUDP, mapped(sourcePort, o.udpBack), []expr.Any{rewrite(sourcePort, expr.CsumTypeInet)})...)
	return t.Flush()
}

// set replaces what the maps have.
func (o *ownerTable) set(ports map[Port]uint16) error {
	var tcp, udp, udpBack []nftables.SetElement
	for p, local := range ports {
		there := nftables.SetElement{Key: portBytes(p.Port), Val: portBytes(local)}
		if p.Protocol == TCP {
			tcp = append(tcp, there)
			continue
		}
		udp = append(udp, there)
		udpBack = append(udpBack, nftables.SetElement{Key: there.Val, Val: there.Key})
	}
	for _, m := range []struct {
		set      *nftables.Set
		elements []nftables.SetElement
	}{{o.tcp, tcp}, {o.udp, udp}, {o.udpBack, udpBack}} {
		o.table.FlushSet(m.set)
		if len(m.elements) == 0 {
			continue
		}
		if err := o.table.SetAddElements(m.set, m.elements); err != nil {
			return err
		}
	}
	return o.table.Flush()
}

// close removes the table, and the routes of diversion.
func (o *ownerTable) close() error { return errors.Join(o.table.Close(), o.diversion.removeRoutes()) }

// divert adds the rules without which the application's answers would go to the client:
//
//	chain output {                                                   # before conntrack
//	  meta mark DIVERT ct original zone set ZONE
//	}
//	chain divert-DIVERT { type route hook output priority mangle
//	  meta mark DIVERT ct mark set DIVERT                            # our packets
//	  ct direction reply ct mark DIVERT meta mark set DIVERT         # the answers: routed again, by the mark, to lo
//	}
//
// The zone is for what we send only. Without it conntrack would take our packet for one of the client's own connection to that
// port, should both come from the same port of the client: and that one is redirected, to us.
func (o *ownerTable) divert() error {
	if o.diverts {
		return nil
	}
	mark := binaryutil.NativeEndian.PutUint32(uint32(o.diversion))
	var c *nftables.Chain
	add := func() error {
		c = o.table.Chain(o.diversion.chain(), nftables.ChainTypeRoute, nftables.ChainHookOutput, *nftables.ChainPriorityMangle)
		o.table.Rule(c, ownertable.Join(ownertable.Is(expr.MetaKeyMARK, mark), setCtMark(uint32(o.diversion)))...)
		o.table.Rule(c, ownertable.Join(
			[]expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, ownertable.Equal([]byte{ctReply})},
			ctMarkIs(uint32(o.diversion)),
			[]expr.Any{
				&expr.Immediate{Register: 1, Data: mark},
				&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
			})...)
		return o.table.Flush()
	}
	if err := add(); err != nil {
		return err
	}
	o.diverts = true
	if err := o.addZone(mark); err != nil { // CONFIG_NF_CONNTRACK_ZONES, which nearly every kernel has
		o.logger.Warn("conntrack has no zones: a connection to the application fails if it comes from the port of another one of the client", "error", err)
	}
	return nil
}

// ctReply is IP_CT_DIR_REPLY, ctOriginal is IP_CT_DIR_ORIGINAL.
const ctOriginal, ctReply = 0, 1

func (o *ownerTable) addZone(mark []byte) error {
	var exprs [][]byte
	for _, e := range append(ownertable.Is(expr.MetaKeyMARK, mark), &expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint16(zone)}) {
		b, err := expr.Marshal(byte(nftables.TableFamilyINet), e)
		if err != nil {
			return err
		}
		exprs = append(exprs, b)
	}
	// The library does not say the direction of a zone.
	data, err := nlattr.MarshalAttributes([]nlattr.Attribute{
		{Type: unix.NFTA_CT_KEY, Data: binaryutil.BigEndian.PutUint32(unix.NFT_CT_ZONE)},
		{Type: unix.NFTA_CT_DIRECTION, Data: []byte{ctOriginal}},
		{Type: unix.NFTA_CT_SREG, Data: binaryutil.BigEndian.PutUint32(unix.NFT_REG_1)},
	})
	if err != nil {
		return err
	}
	set, err := nlattr.MarshalAttributes([]nlattr.Attribute{
		{Type: unix.NFTA_EXPR_NAME, Data: []byte("ct\x00")},
		{Type: unix.NLA_F_NESTED | unix.NFTA_EXPR_DATA, Data: data},
	})
	if err != nil {
		return err
	}
	return o.table.MarshalledRule(o.output, append(exprs, set)...)
}

// Where things are in the header of TCP, UDP or both.
const (
	sourcePort      = 0
	destinationPort = 2
	udpChecksum     = 6

	fin, syn, rst, ack = 1, 2, 4, 16
)

func load(offset, length uint32) *expr.Payload {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// mapped looks a port up, and leaves what it finds in register 2; the rule ends where there is nothing.
func mapped(offset uint32, m *nftables.Set) []expr.Any {
	return []expr.Any{
		load(offset, 2),
		&expr.Lookup{SourceRegister: 1, DestRegister: 2, IsDestRegSet: true, SetName: m.Name, SetID: m.ID},
	}
}

// rewrite writes register 2 to where a port is.
func rewrite(offset uint32, checksum expr.PayloadCsumType) *expr.Payload {
	return &expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: 2, Base: expr.PayloadBaseTransportHeader,
		Offset: offset, Len: 2, CsumType: checksum, CsumOffset: udpChecksum,
	}
}

func ctMarkIs(mark uint32) []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, ownertable.Equal(binaryutil.NativeEndian.PutUint32(mark))}
}

func setCtMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true},
	}
}

func portBytes(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
