package osdns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevpn/pkg/wakeup"
)

// Limits of one key. scutil(8) reads lines of 2048 bytes and ignores the rest (scutil.c of Apple's configd). macOS was
// seen to ignore keys of more than 50 domains or 1500 bytes.
const (
	maxKeyDomains = 50
	maxKeyBytes   = 1500
	// maxSearch is the number of search domains that macOS uses.
	maxSearch = 6
)

// storeKey is a key of macOS' dynamic store that names a resolver for some domains.
type storeKey struct {
	Name     string
	Resolver netip.Addr
	Domains  []string
	Search   bool // the domains are also suffixes for single-label names
}

// storeKeys returns the keys for a config. owner is a part of their names: each process has keys of its own.
func storeKeys(cfg Config, owner string) (keys []storeKey, warnings []string) {
	for _, l := range cfg.Links {
		if !l.Resolver.IsValid() {
			continue
		}
		name := func(part string) string {
			return fmt.Sprintf("State:/Network/Service/%s-%s-%s/DNS", owner, l.Name, part)
		}
		search := l.SearchDomains
		if len(search) > maxSearch {
			warnings = append(warnings, fmt.Sprintf("macOS uses %d search domains: single-label names are not tried "+
				"with %s", maxSearch, strings.Join(search[maxSearch:], ", ")))
			search = search[:maxSearch]
		}
		if len(search) > 0 {
			keys = append(keys, storeKey{Name: name("search"), Resolver: l.Resolver, Domains: search, Search: true})
		}
		for i, domains := range chunks(l.MatchDomains) {
			keys = append(keys, storeKey{Name: name(strconv.Itoa(i)), Resolver: l.Resolver, Domains: domains})
		}
	}
	return keys, warnings
}

// chunks cuts a list of domains into lists for one key each.
func chunks(domains []string) (out [][]string) {
	size := 0
	for i, d := range domains {
		if size += len(d) + 1; i == 0 || size > maxKeyBytes || len(out[len(out)-1]) == maxKeyDomains {
			out, size = append(out, nil), len(d)+1
		}
		last := &out[len(out)-1]
		*last = append(*last, d)
	}
	return out
}

// script returns the commands of scutil(8) that replace the keys from by the keys to. configd removes a temporary key
// when the scutil that added it ends, in whatever way.
func script(from, to []storeKey) string {
	same := func(list []storeKey, k storeKey) bool {
		return slices.ContainsFunc(list, func(o storeKey) bool {
			return o.Name == k.Name && o.Resolver == k.Resolver && o.Search == k.Search &&
				slices.Equal(o.Domains, k.Domains)
		})
	}
	var b strings.Builder
	for _, k := range from {
		if !same(to, k) {
			fmt.Fprintf(&b, "remove %s\n", k.Name)
		}
	}
	for _, k := range to {
		if same(from, k) {
			continue
		}
		noSearch := 1 // otherwise each domain would become a search domain
		if k.Search {
			noSearch = 0
		}
		fmt.Fprintf(&b, "d.init\nd.add ServerAddresses * %s\nd.add SupplementalMatchDomains * %s\n"+
			"d.add SupplementalMatchDomainsNoSearch # %d\nadd %s temporary\n",
			k.Resolver, strings.Join(k.Domains, " "), noSearch, k.Name)
	}
	return b.String()
}

// defaultNameservers returns the nameservers of the first resolver in the output of `scutil --dns`, which answers the
// names that no other resolver answers.
func defaultNameservers(output string) []netip.AddrPort {
	var addrs []netip.Addr
	port := uint16(53)
	found := false
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "resolver #") {
			if found {
				break
			}
			found = true
		}
		key, value, _ := strings.Cut(line, ":")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		switch {
		case !found:
		case key == "domain": // the machine has no default resolver; this one is for a domain
			return nil
		case key == "port":
			if n, err := strconv.ParseUint(value, 10, 16); err == nil && n != 0 {
				port = uint16(n)
			}
		case strings.HasPrefix(key, "nameserver["):
			if a, err := netip.ParseAddr(value); err == nil {
				addrs = append(addrs, a.Unmap())
			}
		}
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		out = append(out, netip.AddrPortFrom(a, port))
	}
	return out
}

// answerTimeout limits one answer of scutil, which takes milliseconds.
const answerTimeout = 10 * time.Second

// scutil is a running scutil(8): the session whose temporary keys configd keeps.
//
//	do ──commands──▶ stdin ┐
//	                scutil ══ configd
//	do ◀──answers─── stdout ┤
//	changed ◀─ notifications┘
type scutil struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan string   // lines; closed at the end
	changed wakeup.Signal // the watched key has changed, or scutil ended
	count   int           // of calls of do
}

// startScutil starts a session, which watches dnsKey. The caller closes it.
func startScutil(program []string, changed wakeup.Signal) (*scutil, error) {
	s := &scutil{
		cmd: exec.Command(program[0], program[1:]...), answers: make(chan string, 256), changed: changed,
	}
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting scutil: %w", err)
	}
	go s.read(out)
	if _, err := s.do("n.add " + dnsKey + "\nn.watch\n"); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// read sorts the lines of scutil until its end.
func (s *scutil) read(out io.Reader) {
	defer close(s.answers)
	defer s.changed.Raise()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		switch line := strings.TrimSpace(lines.Text()); {
		case strings.Contains(line, "changedKey ["), strings.HasPrefix(line, "SCDynamicStore server restarted"):
			s.changed.Raise()
		case strings.HasPrefix(line, "notification callback"), line == "", line == "<dictionary> {", line == "}":
		default:
			select {
			case s.answers <- line:
			default: // more output than a command prints
			}
		}
	}
}

// do runs commands and returns what scutil printed about them. It prints nothing about a command that succeeds. One
// goroutine may call it at a time.
func (s *scutil) do(commands string) (answer []string, err error) {
	s.count++
	end := fmt.Sprintf("kubevpn-end : %d", s.count)
	if _, err := fmt.Fprintf(s.in, "%sd.init\nd.add kubevpn-end # %d\nd.show\n", commands, s.count); err != nil {
		return nil, fmt.Errorf("writing to scutil: %w", err)
	}
	limit := time.After(answerTimeout)
	for {
		select {
		case line, ok := <-s.answers:
			switch {
			case !ok:
				return answer, errors.New("scutil ended")
			case line == end:
				return answer, nil
			}
			answer = append(answer, line)
		case <-limit:
			return answer, fmt.Errorf("scutil has not answered within %v", answerTimeout)
		}
	}
}

// close ends the session. configd removes its keys.
func (s *scutil) close() error {
	err := s.in.Close() // scutil ends at the end of its input
	limit := time.AfterFunc(answerTimeout, func() { _ = s.cmd.Process.Kill() })
	defer limit.Stop()
	for range s.answers { // until it ends
	}
	if e := s.cmd.Wait(); e != nil && !errors.As(e, new(*exec.ExitError)) {
		err = errors.Join(err, e)
	}
	return err
}
