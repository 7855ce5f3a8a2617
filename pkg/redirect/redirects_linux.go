package redirect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/ownertable"
)

// priority puts our redirect before everybody else's destination NAT (-100): the first to set up NAT for a connection wins.
// Connections are tracked by then (-200).
const priority = -110

// ctConfirmed is IPS_CONFIRMED of nf_conntrack_common.h: a packet of the flow has arrived before.
const ctConfirmed = 1 << 3

// Redirects is this table:
//
//	table inet NAME { flags owner
//	  map tcp { type inet_service : inet_service }             # port → local port
//	  map udp { type inet_service : inet_service }
//	  map udp-back { type inet_service : inet_service }        # local port → port
//
//	  chain tcp { type nat hook prerouting priority -110
//	    iifname != "lo" fib daddr type local tcp flags & (fin|syn|rst|ack) == syn dnat to :tcp dport map @tcp
//	  }
//	  chain udp { type filter hook prerouting priority -110
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
// UDP has no NAT, as NAT would outlive the table: conntrack keeps it for as long as the client goes on sending, to a port where
// nobody is any more. So the table says which flows are redirected (those that began since, by conntrack's mark) and the ports
// are rewritten packet by packet, outside of what conntrack sees.
//
// Its methods may be called from several goroutines.
type Redirects struct {
	mark   uint32
	logger *slog.Logger

	mu                sync.Mutex // guards all below
	table             *ownertable.Table
	tcp, udp, udpBack *nftables.Set
	output            *nftables.Chain
	diverts           bool                // the rules of Transparent are there
	local4, local6    map[netip.Addr]bool // addresses to which DialFrom keeps the client's address
}

// New makes the table, empty as yet, and so proves that the kernel can redirect. An error says what is missing. It takes over
// what an earlier process of the same Mark has left, and waits for the table of one that is ending.
func New(cfg Config) (*Redirects, error) {
	table, err := openTable(cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("the table %s: %w", cfg.Name, err)
	}
	r := &Redirects{mark: cfg.Mark, logger: cfg.Logger, table: table}
	if r.logger == nil {
		r.logger = slog.New(slog.DiscardHandler)
	}
	if err := r.build(); err != nil {
		return nil, errors.Join(fmt.Errorf("making the chains of a redirect (nf_tables with nat, fib and ct): %w", err), table.Close())
	}
	return r, nil
}

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

func (r *Redirects) build() error {
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
	t := r.table
	fromOutside := ownertable.Join(
		ownertable.IsNot(expr.MetaKeyIIFNAME, ownertable.Link("lo")),
		[]expr.Any{
			&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			ownertable.Equal(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)),
		})
	tcp := t.Chain("tcp", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, priority)
	t.Rule(tcp, ownertable.Join(
		fromOutside,
		ownertable.Is(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}),
		[]expr.Any{
			load(13, 1),
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0}},
			ownertable.Equal([]byte{syn}),
		},
		mapped(destinationPort, r.tcp),
		[]expr.Any{&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_INET, RegProtoMin: 2}})...)

	udp := t.Chain("udp", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, priority)
	isUDP := ownertable.Is(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP})
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
		mapped(destinationPort, r.udp),
		setCtMark(r.mark))...)
	ours := ownertable.Join(isUDP, ctMarkIs(r.mark))
	// A datagram whose sender left the checksum out has none afterwards either.
	t.Rule(udp, ownertable.Join(
		ours,
		[]expr.Any{load(udpChecksum, 2), ownertable.Equal([]byte{0, 0})},
		mapped(destinationPort, r.udp),
		[]expr.Any{rewrite(destinationPort, expr.CsumTypeNone)},
		ownertable.Verdict(expr.VerdictAccept))...)
	t.Rule(udp, ownertable.Join(ours, mapped(destinationPort, r.udp), []expr.Any{rewrite(destinationPort, expr.CsumTypeInet)})...)

	r.output = t.Chain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityRaw)
	t.Rule(r.output, ownertable.Join(isUDP, mapped(sourcePort, r.udpBack), []expr.Any{rewrite(sourcePort, expr.CsumTypeInet)})...)
	return t.Flush()
}

// Set says which ports are redirected, and to which local ports: whoever listens there does so at all addresses, in both
// families. Each connection meets what was set before or what is set now, nothing in between. A TCP connection that is open
// stays where it is. A UDP flow that began between New and the redirect of its port stays with the application, one of which
// the kernel did not know before counts as new, and one that is redirected goes with its port: back, or to another local port.
// UDP ports need local ports of their own.
func (r *Redirects) Set(ports map[Port]uint16) error {
	if err := validate(ports); err != nil {
		return err
	}
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
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		return os.ErrClosed
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
			return fmt.Errorf("redirecting %v: %w", ports, err)
		}
	}
	if err := r.table.Flush(); err != nil {
		return fmt.Errorf("redirecting %v: %w", ports, err)
	}
	r.logger.Info("ports are redirected", "ports", fmt.Sprint(ports))
	return nil
}

// Close gives every port back, and removes what is left besides the table. Close redirected connections first: once nobody
// does NAT in the namespace any more, the kernel does not know whose they are. A second Close does nothing.
func (r *Redirects) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		return nil
	}
	err := r.table.Close()
	r.table, r.local4, r.local6 = nil, nil, nil
	return errors.Join(err, r.removeRoutes())
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
