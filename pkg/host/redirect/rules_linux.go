package redirect

import (
	"encoding/binary"
	"slices"

	"kubevpn/pkg/host/netfilter"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// The kernel tracks connections (-200) before both.
const (
	// tcpPriority comes after other programs' destination NAT (-100): the first rule that sets up NAT for a connection
	// wins. A service mesh in the pod uses such NAT, and must get connections first. Otherwise the redirect would get
	// traffic that only the mesh can read, and bypass the rejections of the mesh.
	tcpPriority = -90
	// udpPriority comes before it: the rules rewrite ports without NAT, and must see the original ports of a packet.
	udpPriority = -110
)

// ctConfirmed is IPS_CONFIRMED of nf_conntrack_common.h: a packet of the flow has arrived before.
const ctConfirmed = 1 << 3

// addRules fills the table:
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
// Transparent adds what divert shows.
//
// Only a SYN is redirected, because conntrack may begin with this table: then an older connection looks new to it.
//
// A datagram that a client sends to the local port itself is dropped, because it would look like a redirected one.
// (For TCP, OriginalDestination tells them apart.)
//
// UDP uses no NAT, because NAT would outlive the table: as long as the client goes on sending, conntrack would rewrite
// its datagrams to a port on which no program listens. Instead the table sets conntrack's mark on the flows that it
// redirects, which began since. It rewrites the ports of each packet where conntrack does not see it.
func (r *Redirects) addRules() error {
	for _, m := range []struct {
		name string
		set  **nftables.Set
	}{{"tcp", &r.tcp}, {"udp", &r.udp}, {"udp-back", &r.udpBack}} {
		*m.set = &nftables.Set{
			Table: r.table.Table(), Name: m.name, IsMap: true,
			KeyType: nftables.TypeInetService, DataType: nftables.TypeInetService, KeyByteOrder: binaryutil.BigEndian,
		}
		if err := r.table.AddSet(*m.set, nil); err != nil {
			return err
		}
	}
	r.addTCPRules()
	r.addUDPRules()
	return r.table.Flush()
}

// fromOutside matches packets from another network namespace to an address of this one.
func fromOutside() []expr.Any {
	return append(
		netfilter.MetaIsNot(expr.MetaKeyIIFNAME, netfilter.InterfaceName("lo")),
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		netfilter.Equal(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)))
}

func (r *Redirects) addTCPRules() {
	t := r.table
	tcp := t.Chain("tcp", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, tcpPriority)
	t.Rule(tcp,
		fromOutside(),
		netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}),
		[]expr.Any{
			load(13, 1),
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{fin | syn | rst | ack},
				Xor: []byte{0}},
			netfilter.Equal([]byte{syn}),
		},
		mapped(destinationPort, r.tcp),
		[]expr.Any{&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_INET, RegProtoMin: 2}})
}

func (r *Redirects) addUDPRules() {
	t := r.table
	udp := t.Chain("udp", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, udpPriority)
	isUDP := netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP})
	t.Rule(udp, fromOutside(), isUDP, mapped(destinationPort, r.udpBack), netfilter.Verdict(expr.VerdictDrop))
	t.Rule(udp,
		fromOutside(), isUDP,
		[]expr.Any{
			&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
			&expr.Bitwise{
				SourceRegister: 1, DestRegister: 1, Len: 4,
				Mask: binaryutil.NativeEndian.PutUint32(ctConfirmed), Xor: make([]byte, 4),
			},
			netfilter.Equal(make([]byte, 4)),
		},
		mapped(destinationPort, r.udp),
		setCtMark(r.mark))
	ours := slices.Concat(isUDP, ctMarkIs(r.mark))
	// A datagram without a checksum stays without one.
	t.Rule(udp,
		ours,
		[]expr.Any{load(udpChecksum, 2), netfilter.Equal([]byte{0, 0})},
		mapped(destinationPort, r.udp),
		[]expr.Any{rewrite(destinationPort, expr.CsumTypeNone)},
		netfilter.Verdict(expr.VerdictAccept))
	t.Rule(udp, ours, mapped(destinationPort, r.udp), []expr.Any{rewrite(destinationPort, expr.CsumTypeInet)})

	r.output = t.Chain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityRaw)
	t.Rule(r.output, isUDP, mapped(sourcePort, r.udpBack), []expr.Any{rewrite(sourcePort, expr.CsumTypeInet)})
}

// setMaps replaces the elements of the maps.
func (r *Redirects) setMaps(ports map[Port]uint16) error {
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
	}{{r.tcp, tcp}, {r.udp, udp}, {r.udpBack, udpBack}} {
		r.table.FlushSet(m.set)
		if len(m.elements) == 0 {
			continue
		}
		if err := r.table.SetAddElements(m.set, m.elements); err != nil {
			return err
		}
	}
	return r.table.Flush()
}

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
// The zone is only for packets that this process sends. Without it, if the client uses the same source port, conntrack
// would assign the packet to the client's own connection to that port, which is redirected to this process.
func (r *Redirects) divert() error {
	if r.diverts {
		return nil
	}
	mark := binaryutil.NativeEndian.PutUint32(uint32(r.diversion))
	var c *nftables.Chain
	add := func() error {
		c = r.table.Chain(r.diversion.chain(), nftables.ChainTypeRoute, nftables.ChainHookOutput,
			*nftables.ChainPriorityMangle)
		r.table.Rule(c, netfilter.MetaIs(expr.MetaKeyMARK, mark), setCtMark(uint32(r.diversion)))
		r.table.Rule(c,
			[]expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, netfilter.Equal([]byte{ctReply})},
			ctMarkIs(uint32(r.diversion)),
			[]expr.Any{
				&expr.Immediate{Register: 1, Data: mark},
				&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
			})
		return r.table.Flush()
	}
	if err := add(); err != nil {
		return err
	}
	r.diverts = true
	if err := r.addZone(mark); err != nil { // CONFIG_NF_CONNTRACK_ZONES, which nearly every kernel has
		r.logger.Warn("conntrack has no zones: a connection to the application fails if another connection of the "+
			"client uses the same source port", "error", err)
	}
	return nil
}

// ctReply is IP_CT_DIR_REPLY, ctOriginal is IP_CT_DIR_ORIGINAL.
const ctOriginal, ctReply = 0, 1

func (r *Redirects) addZone(mark []byte) error {
	var exprs [][]byte
	for _, e := range append(netfilter.MetaIs(expr.MetaKeyMARK, mark),
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint16(zone)}) {
		b, err := expr.Marshal(byte(nftables.TableFamilyINet), e)
		if err != nil {
			return err
		}
		exprs = append(exprs, b)
	}
	// The library cannot encode the direction of a zone.
	data, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_CT_KEY, Data: binaryutil.BigEndian.PutUint32(unix.NFT_CT_ZONE)},
		{Type: unix.NFTA_CT_DIRECTION, Data: []byte{ctOriginal}},
		{Type: unix.NFTA_CT_SREG, Data: binaryutil.BigEndian.PutUint32(unix.NFT_REG_1)},
	})
	if err != nil {
		return err
	}
	set, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_EXPR_NAME, Data: []byte("ct\x00")},
		{Type: unix.NLA_F_NESTED | unix.NFTA_EXPR_DATA, Data: data},
	})
	if err != nil {
		return err
	}
	return r.table.MarshaledRule(r.output, append(exprs, set)...)
}

// Offsets in the headers of TCP and UDP, and flags of TCP.
const (
	sourcePort      = 0
	destinationPort = 2
	udpChecksum     = 6

	fin, syn, rst, ack = 1, 2, 4, 16
)

func load(offset, length uint32) *expr.Payload {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// mapped looks a port up and stores the result in register 2. If the map lacks the port, the rule ends.
func mapped(offset uint32, m *nftables.Set) []expr.Any {
	return []expr.Any{
		load(offset, 2),
		&expr.Lookup{SourceRegister: 1, DestRegister: 2, IsDestRegSet: true, SetName: m.Name, SetID: m.ID},
	}
}

// rewrite writes register 2 to the port at offset.
func rewrite(offset uint32, checksum expr.PayloadCsumType) *expr.Payload {
	return &expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: 2, Base: expr.PayloadBaseTransportHeader,
		Offset: offset, Len: 2, CsumType: checksum, CsumOffset: udpChecksum,
	}
}

func ctMarkIs(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, netfilter.Equal(binaryutil.NativeEndian.PutUint32(mark)),
	}
}

func setCtMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true},
	}
}

func portBytes(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
