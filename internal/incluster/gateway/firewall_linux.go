package gateway

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"kubevpn/internal/api"
)

// lockTimeout is how long iptables waits for its lock, in seconds.
const lockTimeout = 5

// Our chains. Every rule of ours is in one of them, except the two jumps.
const (
	natChain    = "KUBEVPN-POSTROUTING"
	mangleChain = "KUBEVPN-FORWARD"
	sourceChain = "KUBEVPN-SOURCES"
)

// hook is a jump from a chain of the kernel to one of our chains.
type hook struct{ table, base, chain string }

var hooks = []hook{{"nat", "POSTROUTING", natChain}, {"mangle", "FORWARD", mangleChain},
	{"mangle", "FORWARD", sourceChain}}

// rule is a rule in one of our chains.
type rule struct {
	table, chain string
	spec         []string
	first        bool // inserted at the start of the chain
}

func (r rule) equal(o rule) bool {
	return r.table == o.table && r.chain == o.chain && slices.Equal(r.spec, o.spec)
}

// family is iptables or ip6tables, and the rules that it has set.
type family struct {
	tables *iptables.IPTables
	ipv6   bool
	have   []rule
}

// firewall sets the rules by which the pod's kernel masquerades packets from the TUN device. It is not safe for
// concurrent use.
type firewall struct {
	backend string // "nft" or "legacy"
	v4, v6  *family
	noV6    string // why v6 is nil
}

// backends in the order of preference. legacy is for kernels without NF_TABLES_IPV4; it needs NET_RAW, for the raw
// socket through which it speaks to the kernel.
var backends = []string{"nft", "legacy"}

// openFirewall finds the backend that works here: it adds, lists and removes test rules. That also removes the rules of
// an earlier gateway, which found the same backend. programs is the directory of iptables-nft and its like.
func openFirewall(programs string, log *slog.Logger) (*firewall, error) {
	var errs []error
	for _, backend := range backends {
		v4, err := openFamily(programs, backend, false)
		if err != nil {
			log.Info("cannot use this iptables backend", "backend", backend, "err", err)
			errs = append(errs, fmt.Errorf("iptables-%s: %w", backend, err))
			continue
		}
		f := &firewall{backend: backend, v4: v4}
		if f.v6, err = openFamily(programs, backend, true); err != nil {
			f.noV6 = fmt.Sprintf("ip6tables-%s does not work: %v", backend, err)
		}
		return f, nil
	}
	return nil, api.Errorf(api.ExitNetwork, "no iptables backend can masquerade: %w", errors.Join(errs...))
}

// openFamily returns a family that works: it adds the rules for a documentation network, lists them, and removes them
// and all earlier ones.
func openFamily(programs, backend string, ipv6 bool) (*family, error) {
	name, protocol, try := "iptables-", iptables.ProtocolIPv4, netip.MustParsePrefix("192.0.2.0/24")
	if ipv6 {
		name, protocol, try = "ip6tables-", iptables.ProtocolIPv6, netip.MustParsePrefix("2001:db8::/32")
	}
	tables, err := iptables.New(iptables.Path(filepath.Join(programs, name+backend)), iptables.IPFamily(protocol),
		iptables.Timeout(lockTimeout))
	if err != nil {
		return nil, err
	}
	f := &family{tables: tables, ipv6: ipv6}
	err = f.set([]netip.Prefix{try})
	if err == nil {
		err = f.check(try)
	}
	if err := errors.Join(err, f.remove()); err != nil {
		return nil, err
	}
	return f, nil
}

// check returns an error unless iptables lists the rule for network in our chain of nat.
func (f *family) check(network netip.Prefix) error {
	lines, err := f.tables.List("nat", natChain)
	if err != nil {
		return fmt.Errorf("listing %s: %w", natChain, err)
	}
	if !slices.ContainsFunc(lines, func(l string) bool {
		return strings.Contains(l, network.String()) && strings.Contains(l, "MASQUERADE")
	}) {
		return fmt.Errorf("iptables does not list a rule that was added: %q", lines)
	}
	return nil
}

// rules returns our rules for these networks, in the order in which to set them:
//
//   - Packets from laptops leave the pod with the pod's address, so that answers need no routes of their own.
//   - TCP segments fit the path MTU, in both directions.
//   - Packets with another source than a laptop's are dropped. This includes packets that arrive before the rule for
//     their network: otherwise conntrack would keep the flow as one that is not masqueraded, and no answer would arrive.
//   - Laptops receive answers to their own flows, with the ICMP errors about them, and no flow that a pod begins. Only
//     the pod's kernel can decide this, because its conntrack knows the flows.
func (f *family) rules(networks []netip.Prefix) []rule {
	var all []rule
	add := func(r rule, comment string, target ...string) {
		r.spec = slices.Concat(r.spec, []string{"-m", "comment", "--comment", "kubevpn: " + comment, "-j"}, target)
		all = append(all, r)
	}
	nat := func(match ...string) rule { return rule{table: "nat", chain: natChain, spec: match} }
	source := func(match ...string) rule { return rule{table: "mangle", chain: sourceChain, spec: match} }
	mss := func(match ...string) rule { return rule{table: "mangle", chain: mangleChain, spec: match} }

	networks = slices.DeleteFunc(slices.Clone(networks), func(n netip.Prefix) bool { return n.Addr().Is6() != f.ipv6 })
	for _, n := range networks {
		add(nat("-s", n.String(), "!", "-o", device), "laptops leave with the address of the pod", "MASQUERADE")
	}
	add(source("-i", device), "not from a laptop", "DROP")
	for _, n := range networks {
		r := source("-s", n.String(), "-i", device)
		r.first = true
		add(r, "from a laptop", "RETURN")
	}
	add(source("-o", device, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"), "an answer to a laptop", "RETURN")
	add(source("-o", device), "not an answer to a laptop", "DROP")
	for _, direction := range []string{"-i", "-o"} {
		add(mss(direction, device, "-p", "tcp", "-m", "tcp", "--tcp-flags", "SYN,RST", "SYN"),
			"segments fit the path", "TCPMSS", "--clamp-mss-to-pmtu")
	}
	return all
}

func (h hook) jump() []string {
	return []string{"-m", "comment", "--comment", "kubevpn: the chain of its gateway", "-j", h.chain}
}

// makeChains creates our chains, empty, and the jumps to them.
func (f *family) makeChains() error {
	for _, h := range hooks {
		if err := f.tables.ClearChain(h.table, h.chain); err != nil { // creates it if necessary
			return fmt.Errorf("making the chain %s in %s: %w", h.chain, h.table, err)
		}
		if err := f.tables.InsertUnique(h.table, h.base, 1, h.jump()...); err != nil {
			return fmt.Errorf("entering the chain %s from %s of %s: %w", h.chain, h.base, h.table, err)
		}
	}
	return nil
}

// set replaces the rules by those for networks. It adds the new rules first, and then removes the old ones in reverse.
func (f *family) set(networks []netip.Prefix) error {
	if len(f.have) == 0 {
		if err := f.makeChains(); err != nil {
			return err
		}
	}
	want := f.rules(networks)
	for _, r := range want {
		if slices.ContainsFunc(f.have, r.equal) {
			continue
		}
		add := f.tables.Append
		if r.first {
			add = func(table, chain string, spec ...string) error { return f.tables.Insert(table, chain, 1, spec...) }
		}
		if err := add(r.table, r.chain, r.spec...); err != nil {
			return fmt.Errorf("adding a rule to %s: %w", r.chain, err)
		}
	}
	for _, r := range slices.Backward(f.have) {
		if slices.ContainsFunc(want, r.equal) {
			continue
		}
		if err := f.tables.Delete(r.table, r.chain, r.spec...); err != nil {
			return fmt.Errorf("removing a rule from %s: %w", r.chain, err)
		}
	}
	f.have = want
	return nil
}

// remove removes the jumps and the chains, also those of an earlier gateway.
func (f *family) remove() error {
	var errs []error
	for _, h := range hooks {
		there, err := f.tables.ChainExists(h.table, h.chain)
		if err == nil && there {
			err = errors.Join(
				f.tables.DeleteIfExists(h.table, h.base, h.jump()...),
				f.tables.ClearAndDeleteChain(h.table, h.chain),
			)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing the chain %s from %s: %w", h.chain, h.table, err))
		}
	}
	f.have = nil
	return errors.Join(errs...)
}
