package osdns

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// resolverMark begins the first line of every file of kubevpn in macOS' /etc/resolver; the process ID follows.
const resolverMark = "# made by kubevpn, which removes it when it ends; pid "

// resolverDir manages files in a directory where each file has the name of a domain and contains its server
// (resolver(5) of macOS). It changes no file that does not begin with resolverMark.
type resolverDir struct {
	dir   string
	pid   int
	alive func(pid int) bool
}

// set replaces the files of this process with one for each of the domains. It returns a warning for each domain that
// belongs to another program.
func (r resolverDir) set(domains []string, server netip.AddrPort) (warnings []string, err error) {
	if len(domains) > 0 {
		if err := os.MkdirAll(r.dir, 0o755); err != nil {
			return nil, err
		}
	}
	if err := r.remove(func(name string, pid int) bool {
		return pid == r.pid && !slices.Contains(domains, name)
	}); err != nil {
		return nil, err
	}
	content := fmt.Sprintf("%s%d\nnameserver %s\nport %d\n", resolverMark, r.pid, server.Addr(), server.Port())
	for _, d := range domains {
		path := filepath.Join(r.dir, d)
		if pid, ours, err := readResolverFile(path); err == nil && (!ours || pid != r.pid) {
			warnings = append(warnings,
				fmt.Sprintf("%s belongs to another program, which keeps resolving names under %s", path, d))
			continue
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return warnings, err
		}
		tmp := filepath.Join(r.dir, fmt.Sprintf(".kubevpn-%d", r.pid))
		if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
			return warnings, err
		}
		// Its reader is not root, and our umask keeps others out.
		if err := errors.Join(os.Chmod(tmp, 0o644), os.Rename(tmp, path)); err != nil {
			return warnings, errors.Join(err, os.Remove(tmp))
		}
	}
	return warnings, nil
}

// recover removes the files of processes that have ended, and returns their number.
func (r resolverDir) recover() (removed int, err error) {
	err = r.remove(func(_ string, pid int) bool {
		if pid == r.pid || r.alive(pid) {
			return false
		}
		removed++
		return true
	})
	return removed, err
}

// remove deletes the files of kubevpn for which chosen returns true.
func (r resolverDir) remove(chosen func(name string, pid int) bool) error {
	entries, err := os.ReadDir(r.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(r.dir, e.Name())
		if !e.Type().IsRegular() {
			continue
		}
		pid, ours, err := readResolverFile(path)
		if err != nil {
			errs = append(errs, err)
		} else if ours && chosen(e.Name(), pid) {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}

// readResolverFile returns the process that wrote a file; ours is false if it is not kubevpn's.
func readResolverFile(path string) (pid int, ours bool, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false, err
	}
	first, _, _ := strings.Cut(string(b), "\n")
	rest, found := strings.CutPrefix(first, resolverMark)
	if !found {
		return 0, false, nil
	}
	pid, err = strconv.Atoi(rest)
	if err != nil || pid <= 0 {
		return 0, false, nil
	}
	return pid, true, nil
}

// matchDomains returns the distinct domains of all links, sorted.
func (c Config) matchDomains() []string {
	var out []string
	for _, l := range c.Links {
		out = append(out, l.MatchDomains...)
		out = append(out, l.SearchDomains...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
