package redirect

import (
	"encoding/binary"
	"net/netip"
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
//	    iifname != "lo" fib daddr type local SYN CHECK SOCKET dnat to :tcp dport map @tcp
//	    iifname != "lo" fib daddr type local SYN CHECK accept
//	    iifname != "lo" fib daddr type local SYN dnat to :tcp dport map @tcp
//	  }
//	  chain tcp-within { type nat hook output priority -90     # this chain and udp-within: only with Config.Within
//	    meta skuid USER accept                                 # for each of Config.Exempt
//	    fib daddr type local ip saddr 127.0.0.6 accept
//	    fib daddr type local meta mark != MARK meta mark != DIVERT SYN dnat to :tcp dport map @tcp
//	  }
//	  chain udp { type filter hook prerouting priority -110
//	    udp dport map @udp-back iifname != "lo" fib daddr type local drop
//	    udp dport map @udp iifname != "lo" fib daddr type local ct status ! confirmed ct mark set MARK
//	    ct mark MARK ct direction original udp dport set udp dport map @udp
//	  }
//	  chain udp-within { type filter hook output priority -110
//	    meta skuid USER accept
//	    udp dport map @udp fib daddr type local meta mark != MARK meta mark != DIVERT
//	      ct status ! confirmed ct mark set MARK
//	  }
//	  chain output { type filter hook output priority raw
//	    udp sport set udp sport map @udp-back
//	  }
//	}
//
// The way of packets: the chains on it are in brackets.
//
//	client ── eth0 ──────────────── [tcp] [udp] ──▶ redirector ── Dial: MARK or DIVERT ─┐
//	                                         └────▶ application ◀── lo ◀────────────────┘ no chain matches
//	another container ── [tcp-within] [udp-within] ── lo ── [udp] ──▶ redirector
//	redirector ── [output] ──▶ the client, from the port that it asked
//
// SYN is "tcp flags & (fin|syn|rst|ack) == syn". Only a SYN is redirected, because conntrack may begin with this table:
// then an older connection looks new to it.
//
// CHECK is Config.Checks: a source and a port. SOCKET looks for the socket that would get the packet: without one, it
// ends the rule, and the kernel rejects the SYN.
//
// 127.0.0.6 is where the proxy of Istio's mesh connects from to the application. What it passes on came from outside,
// also what its redirect, which comes first, took from the kubelet; so the redirect leaves both to the mesh.
//
// A datagram that a client sends to the local port itself is dropped, because it would look like a redirected one.
// (For TCP, OriginalDestination tells them apart.)
//
// UDP uses no NAT, because NAT would outlive the table: as long as the client goes on sending, conntrack would rewrite
// its datagrams to a port on which no program listens. Instead the table sets conntrack's mark on the flows that it
// redirects, which began since. It rewrites the ports of each packet where conntrack does not see it.
//
// Transparent adds what divert shows.
func (r *Redirects) addRules(cfg Config) error {
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
	tcp := r.table.Chain("tcp", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, tcpPriority)
	if err := r.table.Flush(); err != nil {
		return err
	}
	r.addCheckRules(tcp, cfg.Checks)
	r.table.Rule(tcp, fromOutside(), begins(), r.toLocalPort())
	r.addUDPRules()
	if cfg.Within {
		r.addWithin(cfg.Exempt)
	}
	return r.table.Flush()
}

// local matches packets to an address of this network namespace.
func local() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		netfilter.Equal(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)),
	}
}

// fromOutside matches packets from another network namespace to an address of this one.
func fromOutside() []expr.Any {
	return append(netfilter.MetaIsNot(expr.MetaKeyIIFNAME, netfilter.InterfaceName("lo")), local()...)
}

// fromWithin matches packets from this network namespace to itself, but not those of Dial.
func (r *Redirects) fromWithin() []expr.Any {
	return slices.Concat(local(),
		netfilter.MetaIsNot(expr.MetaKeyMARK, binaryutil.NativeEndian.PutUint32(r.mark)),
		netfilter.MetaIsNot(expr.MetaKeyMARK, binaryutil.NativeEndian.PutUint32(uint32(r.diversion))))
}

// begins matches the first packet of a TCP connection.
func begins() []expr.Any {
	return append(netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}),
		load(13, 1),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0}},
		netfilter.Equal([]byte{syn}))
}

// toLocalPort redirects what the map tcp has.
func (r *Redirects) toLocalPort() []expr.Any {
	return append(mapped(destinationPort, r.tcp),
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_INET, RegProtoMin: 2})
}

// addCheckRules redirects what Checks names only while a socket listens. A kernel without NFT_SOCKET redirects none of
// it.
func (r *Redirects) addCheckRules(tcp *nftables.Chain, checks Checks) {
	each := func(end []expr.Any) {
		for _, from := range checks.From {
			for _, port := range checks.Ports {
				r.table.Rule(tcp, fromOutside(), begins(), netfilter.SourceIn(from),
					[]expr.Any{load(destinationPort, 2), netfilter.Equal(portBytes(port))}, end)
			}
		}
	}
	each(append([]expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1}}, r.toLocalPort()...))
	if err := r.table.Flush(); err != nil {
		r.logger.Warn("connections from the node to ports that the kubelet checks by a connection alone are not "+
			"redirected: the kernel has no NFT_SOCKET", "error", err)
	}
	each(netfilter.Verdict(expr.VerdictAccept))
}

// addWithin adds the rules for what begins within the network namespace.
func (r *Redirects) addWithin(exempt []uint32) {
	tcp := r.table.Chain("tcp-within", nftables.ChainTypeNAT, nftables.ChainHookOutput, tcpPriority)
	udp := r.table.Chain("udp-within", nftables.ChainTypeFilter, nftables.ChainHookOutput, udpPriority)
	accept := netfilter.Verdict(expr.VerdictAccept)
	for _, user := range exempt {
		is := netfilter.MetaIs(expr.MetaKeySKUID, binaryutil.NativeEndian.PutUint32(user))
		r.table.Rule(tcp, is, accept)
		r.table.Rule(udp, is, accept)
	}
	r.table.Rule(tcp, local(), netfilter.SourceIn(netip.MustParsePrefix("127.0.0.6/32")), accept)
	r.table.Rule(tcp, r.fromWithin(), begins(), r.toLocalPort())
	r.table.Rule(udp, r.newFlow(r.fromWithin()))
}

// newFlow marks a new UDP flow to a port of the map. Each packet passes this rule, which looks for the port before the
// kernel looks for a route.
func (r *Redirects) newFlow(from []expr.Any) []expr.Any {
	return slices.Concat(netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP}),
		mapped(destinationPort, r.udp), from, []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
			&expr.Bitwise{
				SourceRegister: 1, DestRegister: 1, Len: 4,
				Mask: binaryutil.NativeEndian.PutUint32(ctConfirmed), Xor: make([]byte, 4),
			},
			netfilter.Equal(make([]byte, 4)),
		}, setCtMark(r.mark))
}

func (r *Redirects) addUDPRules() {
	t := r.table
	udp := t.Chain("udp", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, udpPriority)
	isUDP := netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP})
	t.Rule(udp, isUDP, mapped(destinationPort, r.udpBack), fromOutside(), netfilter.Verdict(expr.VerdictDrop))
	t.Rule(udp, r.newFlow(fromOutside()))
	ours := slices.Concat(isUDP, ctMarkIs(r.mark), ctDirectionIs(ctOriginal)) // an answer over lo comes here, too
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
			ctDirectionIs(ctReply),
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

func ctDirectionIs(direction byte) []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, netfilter.Equal([]byte{direction})}
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
