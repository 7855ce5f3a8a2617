package redirect

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

const (
	// renewal is how often the clock's limit of rules is moved.
	renewal = time.Second
	// lease is for how long rules hold after that. The kernel compares seconds, and the last one counts to its end: so they hold
	// for four to five seconds.
	lease = 4 * time.Second
	// backstep is by how much the clock may be set back without an effect on rules.
	backstep = 2 * time.Second
	// discard is the port of RFC 863.
	discard = 9
	// lockWait is for how many seconds another program may hold the lock of iptables-legacy.
	lockWait = "5"
	// commandTimeout bounds a run of iptables, and the wait for its lock.
	commandTimeout = 10 * time.Second
)

// rules is the backend for kernels without tables that end with their owner: a chain in nat, for IPv4 and for IPv6.
//
//	-A PREROUTING ! -i lo -m addrtype --dst-type LOCAL -j CHAIN
//	-A CHAIN -p tcp --dport PORT --tcp-flags FIN,SYN,RST,ACK SYN -m time --datestart ... --datestop ... -j DNAT --to-destination :LOCAL
//	-A CHAIN -p udp --dport PORT -m time --datestart ... --datestop ... -j DNAT --to-destination :LOCAL
//	-A CHAIN -p udp --dport LOCAL -m time --datestart ... --datestop ... -j DNAT --to-destination :9
//
// The last is for who sends to the local port itself, which would be taken for redirected; nat has no way to drop a packet, and
// at the port that RFC 863 gives to discarding there is nobody, as a rule.
//
// The kernel keeps rules of iptables when their maker dies. So they hold for five seconds at most (xt_time), and are made anew
// each second, the whole chain in one transaction; what has begun does not come by them again:
//
//	        New          Set of ports            Set of none, Close
//	absent ────▶ empty ──────────────▶ redirects ──────────────────▶ empty, absent
//	  ▲                                 │     ▲ renewed each second
//	  │ Remove, by who outlives us,     │     └── at once
//	  │ or a later New                  ▼
//	  └──────────────────────────── expired: nothing is renewed, or the clock was set by more than the lease
//
// The limits are of the wall clock, as xt_time has no other: the time of day in UTC. Set forward by more than the lease, it ends
// rules until they are renewed, within a second. Set back by more than backstep, likewise, as rules have a beginning too; if
// nobody is left to renew them, they hold again when it is that time again, for as long as they would have.
//
// UDP flows are NAT here, and conntrack remembers them for as long as the client goes on sending. Where redirects change, those
// that they concern are forgotten, and by Remove all of them; the lease alone ends no flow.
type rules struct {
	chain    string
	families []family
	limited  bool // by the clock
	logger   *slog.Logger
	now      func() time.Time

	ports map[Port]uint16
}

// family is iptables or ip6tables, by one of their ways to the kernel.
type family struct {
	programs, variant string // "nft" or "legacy"
	ipv6              bool
}

// variants in the order of preference: legacy takes the capability NET_RAW, too, for the socket by which it speaks to the
// kernel.
var variants = [...]string{"nft", "legacy"}

func (f family) String() string {
	if f.ipv6 {
		return "ip6tables-" + f.variant
	}
	return "iptables-" + f.variant
}

// command runs save or restore, and returns what it prints.
func (f family) command(input, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	program, _, _ := strings.Cut(f.String(), "-")
	cmd := exec.CommandContext(ctx, filepath.Join(f.programs, "xtables-"+f.variant+"-multi"), append([]string{program + "-" + name}, args...)...)
	cmd.Stdin = strings.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s-%s: %w: %s", f, name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// commit changes nat as one.
func (f family) commit(lines ...string) error {
	_, err := f.command("*nat\n"+strings.Join(lines, "\n")+"\nCOMMIT\n", "restore", "--noflush", "--wait", lockWait)
	return err
}

// chainPrefix begins the names of all chains of a mark: a later process finds them by it.
func chainPrefix(cfg Config) string { return fmt.Sprintf("KUBEVPN-%08X-", cfg.Mark) }

// chainName is of one process. It has at most 28 characters.
func chainName(cfg Config) string {
	h := fnv.New32a()
	h.Write([]byte(cfg.Name))
	return fmt.Sprintf("%s%08X", chainPrefix(cfg), h.Sum32())
}

// openRules makes the chain, by the first variant that can.
func openRules(cfg Config) (*rules, error) {
	if cfg.Programs == "" {
		return nil, errors.New("iptables: it is not known where it is")
	}
	b := &rules{chain: chainName(cfg), logger: cfg.Logger, now: time.Now}
	var errs []error
	for _, variant := range variants {
		v4 := family{programs: cfg.Programs, variant: variant}
		if err := b.enter(v4); err != nil {
			errs = append(errs, err)
			continue
		}
		b.families = []family{v4}
		v6 := v4
		v6.ipv6 = true
		if err := b.enter(v6); err != nil {
			cfg.Logger.Warn("connections by IPv6 stay with the application", "why", err)
		} else {
			b.families = append(b.families, v6)
		}
		return b, nil
	}
	return nil, fmt.Errorf("redirecting by iptables: %w", errors.Join(errs...))
}

// enter makes the chain in one family, without redirects, and leads to it behind everybody else's, as tcpPriority says. Where the kernel has no
// xt_time, there are no limits.
func (b *rules) enter(f family) error {
	jump := "-A PREROUTING ! -i lo -m addrtype --dst-type LOCAL -m comment --comment \"kubevpn: redirected ports\" -j " + b.chain
	first := len(b.families) == 0
	if first {
		b.limited = true
	}
	err := f.commit(append(b.script(nil), jump)...)
	if err == nil || !b.limited || !first {
		return err
	}
	b.limited = false
	if unlimitedErr := f.commit(append(b.script(nil), jump)...); unlimitedErr != nil {
		return err // which says as much
	}
	b.logger.Warn("the kernel limits no rules by the clock (xt_time): if nobody is left to remove them, redirects stay until another process takes over", "error", err)
	return nil
}

// script is the chain with these ports. Its first rules match nothing, as lo does not come here: they prove that rules can be
// made, and have conntrack begin.
func (b *rules) script(ports map[Port]uint16) []string {
	limit := ""
	if b.limited {
		now := b.now().UTC()
		limit = fmt.Sprintf(" -m time --datestart %s --datestop %s", date(now.Add(-backstep)), date(now.Add(lease)))
	}
	rule := func(p Port, to uint16, more string) string {
		syn := ""
		if p.Protocol == TCP { // as conntrack may begin with the chain: then a connection that is older looks new to it
			syn = " --tcp-flags FIN,SYN,RST,ACK SYN"
		}
		return fmt.Sprintf("-A %s%s -p %s -m %[3]s --dport %d%s%s -j DNAT --to-destination :%d", b.chain, more, p.Protocol, p.Port, syn, limit, to)
	}
	lines := []string{":" + b.chain + " - [0:0]", rule(Port{TCP, 1}, 1, " -i lo"), rule(Port{UDP, 1}, 1, " -i lo")}
	for _, p := range slices.SortedFunc(maps.Keys(ports), func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	}) {
		lines = append(lines, rule(p, ports[p], ""))
		if p.Protocol == UDP {
			lines = append(lines, rule(Port{UDP, ports[p]}, discard, ""))
		}
	}
	return lines
}

// date is how iptables reads a second, in UTC whatever the time zone of the process or the kernel.
func date(t time.Time) string { return t.Format("2006-01-02T15:04:05") }

// String says how it is done.
func (b *rules) String() string { return b.families[0].String() }

func (b *rules) set(ports map[Port]uint16) error {
	if err := b.write(ports); err != nil {
		return errors.Join(err, b.write(b.ports))
	}
	b.ports = maps.Clone(ports)
	if err := forgetRedirected(func(port, local uint16) bool { return b.ports[Port{UDP, port}] == local }); err != nil {
		b.logger.Warn("UDP flows stay with the port to which they were redirected", "error", err)
	}
	return nil
}

// renew moves the limit.
func (b *rules) renew() error {
	if len(b.ports) == 0 || !b.limited {
		return nil
	}
	return b.write(b.ports)
}

// write writes the chain in each family, with limits from now on.
func (b *rules) write(ports map[Port]uint16) error {
	for _, f := range b.families {
		if err := f.commit(b.script(ports)...); err != nil {
			return err
		}
	}
	return nil
}

func (b *rules) divert() error {
	return errors.New("redirects are by iptables here, whose rules for it would outlive the process")
}

func (b *rules) close() error {
	var errs []error
	for _, f := range b.families {
		errs = append(errs, f.removeChains(func(name string) bool { return name == b.chain }))
	}
	return errors.Join(append(errs, forgetRedirected(func(_, _ uint16) bool { return false }))...)
}

// removeChains removes chains of the mark, whichever variant they were made by, and forgets the UDP flows that they have
// redirected. It asks the kernel first: iptables makes tables by being asked for them.
func removeChains(cfg Config, which func(name string) bool) error {
	if cfg.Programs == "" {
		return nil
	}
	ours := func(name string) bool { return strings.HasPrefix(name, chainPrefix(cfg)) && which(name) }
	var errs []error
	found := false
	for _, f := range []family{
		{cfg.Programs, "nft", false}, {cfg.Programs, "nft", true}, {cfg.Programs, "legacy", false}, {cfg.Programs, "legacy", true},
	} {
		there, err := f.mayHave(ours)
		if err == nil && there {
			found = true
			err = f.removeChains(ours)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	if found {
		errs = append(errs, forgetRedirected(func(_, _ uint16) bool { return false }))
	}
	return errors.Join(errs...)
}

// mayHave reports whether there may be such chains.
func (f family) mayHave(which func(name string) bool) (bool, error) {
	if f.variant == "legacy" {
		raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if errors.Is(err, unix.EPERM) { // so who was here before has made none
			return false, nil
		} else if err != nil {
			return false, fmt.Errorf("opening a raw socket, as iptables-legacy does: %w", err)
		}
		unix.Close(raw)
		names := "/proc/thread-self/net/ip_tables_names"
		if f.ipv6 {
			names = "/proc/thread-self/net/ip6_tables_names"
		}
		b, err := os.ReadFile(names)
		if errors.Is(err, os.ErrNotExist) { // nor ip_tables
			return false, nil
		}
		return slices.Contains(strings.Fields(string(b)), "nat"), err
	}
	conn, err := nftables.New()
	if err != nil { // no nf_tables
		return false, nil
	}
	kind := nftables.TableFamilyIPv4
	if f.ipv6 {
		kind = nftables.TableFamilyIPv6
	}
	chains, err := conn.ListChainsOfTableFamily(kind)
	if err != nil { // nor here
		return false, nil
	}
	return slices.ContainsFunc(chains, func(c *nftables.Chain) bool { return which(c.Name) }), nil
}

// removeChains removes chains from nat, and all that leads to them, as one.
func (f family) removeChains(which func(name string) bool) error {
	saved, err := f.command("", "save", "-t", "nat")
	if err != nil {
		return err
	}
	var flush, leave, remove []string
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, ":"); ok {
			if name, _, _ = strings.Cut(name, " "); which(name) {
				flush = append(flush, ":"+name+" - [0:0]")
				remove = append(remove, "-X "+name)
			}
		}
		rule, ok := strings.CutPrefix(line, "-A ")
		if _, target, jumps := strings.Cut(rule, " -j "); ok && jumps && which(target) {
			leave = append(leave, "-D "+rule)
		}
	}
	if len(remove) == 0 {
		return nil
	}
	return f.commit(slices.Concat(flush, leave, remove)...)
}
