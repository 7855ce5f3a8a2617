package osdns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	nl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/netfilter"
)

// natPriority puts the redirect before other programs' destination NAT (-100), for example Docker's redirect of its
// resolver at 127.0.0.11. The first rule that sets up NAT for a flow wins.
const natPriority = -110

// ownerTable is an nftables table of kubevpn, empty at first:
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
	*netfilter.Table
	redirect *nftables.Chain
	guard    *nftables.Chain
}

// openTable creates the table. Its error says what the machine lacks.
func openTable(name string) (*ownerTable, error) {
	table, err := netfilter.OpenTable(name)
	if err != nil {
		return nil, err
	}
	t := &ownerTable{
		Table:    table,
		redirect: table.Chain("redirect", nftables.ChainTypeNAT, nftables.ChainHookOutput, natPriority),
		guard: table.Chain("guard", nftables.ChainTypeFilter, nftables.ChainHookInput,
			*nftables.ChainPriorityFilter),
	}
	// A rule that matches nothing shows whether the kernel has the expressions that the real ones need.
	t.addRedirect(netip.AddrFrom4([4]byte{255, 255, 255, 255}),
		netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 53))
	if err := t.Flush(); err != nil {
		return nil, errors.Join(fmt.Errorf("making a nat chain: %w", err), t.Close())
	}
	return t, nil
}

// redirection is the wanted content of the table; the zero value is an empty table.
type redirection struct {
	nameservers []netip.Addr // without zones
	to4, to6    netip.AddrPort
	links       []Link // whose addresses are guarded
}

// set replaces all rules in one transaction, so no packet sees a part of them.
func (t *ownerTable) set(r redirection) error {
	t.FlushChain(t.redirect)
	t.FlushChain(t.guard)
	if len(r.nameservers) > 0 {
		t.Rule(t.redirect,
			netfilter.MetaIs(expr.MetaKeyMARK, binaryutil.NativeEndian.PutUint32(Mark)),
			netfilter.Verdict(expr.VerdictReturn))
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
			t.Rule(t.guard,
				netfilter.MetaIsNot(expr.MetaKeyIIFNAME, netfilter.InterfaceName("lo")),
				netfilter.MetaIsNot(expr.MetaKeyIIFNAME, netfilter.InterfaceName(l.Name)),
				netfilter.DestinationIs(a),
				netfilter.Verdict(expr.VerdictDrop))
		}
	}
	return t.Flush()
}

func (t *ownerTable) addRedirect(ns netip.Addr, to netip.AddrPort) {
	family := uint32(unix.NFPROTO_IPV4)
	if to.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		t.Rule(t.redirect,
			netfilter.DestinationIs(ns),
			netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{proto}),
			[]expr.Any{
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
				netfilter.Equal([]byte{0, 53}),
				&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
				&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: 1, RegProtoMin: 2},
			})
	}
}

// flowsTo selects the UDP flows to port 53 of nameservers.
type flowsTo []netip.Addr

func (f flowsTo) MatchConntrackFlow(flow *nl.ConntrackFlow) bool {
	if flow.Forward.Protocol != unix.IPPROTO_UDP || flow.Forward.DstPort != 53 {
		return false
	}
	dst, ok := netip.AddrFromSlice(flow.Forward.DstIP)
	return ok && slices.ContainsFunc(f, func(a netip.Addr) bool { return a.WithZone("") == dst.Unmap() })
}
