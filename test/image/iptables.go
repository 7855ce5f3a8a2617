package image

import (
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Tree contains dynamic programs of Debian and their dependencies.
type Tree struct {
	Files []File // of the architecture of the image's static binaries
	Links []Link
}

// Link is a symbolic link in the image.
type Link struct {
	Path   string // its absolute path in the image
	Target string // the path to which it points
}

// The programs that `traffic gateway` runs; their names select what they do.
var (
	iptablesPrograms = map[string][]string{
		"xtables-nft-multi":    {"iptables-nft", "ip6tables-nft"},
		"xtables-legacy-multi": {"iptables-legacy", "ip6tables-legacy"},
	}
	iptablesExtensions = []string{"MASQUERADE", "TCPMSS", "comment", "conntrack", "standard", "tcp"}
)

// IPTables gathers iptables from this machine, of both of its backends: /usr/sbin/iptables-nft, iptables-legacy and
// the same for IPv6, with the extensions that masquerading, answers alone, MSS clamping and redirects for a limited
// time take, and with their libraries.
func IPTables() (Tree, error) { return gatherer{root: "/"}.iptables() }

// gatherer collects files below root under their paths there.
type gatherer struct{ root string }

func (g gatherer) iptables() (Tree, error) {
	t := &Tree{}
	var machine elf.Machine // common to all files, because a machine may have libraries for several
	for program, names := range iptablesPrograms {
		file := "/usr/sbin/" + program
		if _, err := os.Stat(g.at(file)); err != nil {
			return Tree{}, fmt.Errorf("%s goes into the image and is not on this machine; install Debian's package "+
				"iptables (scripts/packages does): %w", file, err)
		}
		if err := g.add(t, file); err != nil {
			return Tree{}, err
		}
		e, err := read(g.at(file))
		if err != nil {
			return Tree{}, fmt.Errorf("%s: %w", file, err)
		}
		machine = e.machine
		for _, name := range names {
			t.Links = append(t.Links, Link{Path: "/usr/sbin/" + name, Target: program})
		}
	}
	if err := g.addExtensions(t, machine); err != nil {
		return Tree{}, err
	}
	slices.SortFunc(t.Files, func(a, b File) int { return cmp.Compare(a.Path, b.Path) })
	slices.SortFunc(t.Links, func(a, b Link) int { return cmp.Compare(a.Path, b.Path) })
	return *t, nil
}

// addExtensions adds the shared objects that iptables loads by name; some are links to others.
func (g gatherer) addExtensions(t *Tree, machine elf.Machine) error {
	for _, extension := range iptablesExtensions {
		found := false
		for _, prefix := range []string{"libxt_", "libipt_", "libip6t_"} { // for both families, or for one
			file, err := g.find(machine, "xtables/"+prefix+extension+".so")
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = g.add(t, file)
			}
			if err != nil {
				return err
			}
			found = true
		}
		if !found {
			return fmt.Errorf("iptables' extension %s goes into the image and is not on this machine; install "+
				"Debian's package iptables (scripts/packages does)", extension)
		}
	}
	return nil
}

// at returns the path on this machine of a path in the image.
func (g gatherer) at(file string) string { return filepath.Join(g.root, filepath.FromSlash(file)) }

// below is the inverse of at.
func (g gatherer) below(file string) string {
	return path.Join("/", filepath.ToSlash(strings.TrimPrefix(file, filepath.Clean(g.root))))
}

// add adds a program or a shared object, what it is linked to, and so on. A link to a file beside it stays a link; any
// other becomes the file.
func (g gatherer) add(t *Tree, file string) error {
	if slices.ContainsFunc(t.Files, func(f File) bool { return f.Path == file }) ||
		slices.ContainsFunc(t.Links, func(l Link) bool { return l.Path == file }) {
		return nil
	}
	target, err := os.Readlink(g.at(file))
	if err == nil && path.Base(target) == target {
		t.Links = append(t.Links, Link{Path: file, Target: target})
		return g.add(t, path.Join(path.Dir(file), target))
	}
	t.Files = append(t.Files, File{Source: g.at(file), Path: file})
	e, err := read(g.at(file))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if e.interpreter != "" {
		if err := g.add(t, e.interpreter); err != nil {
			return err
		}
	}
	for _, name := range e.needed {
		library, err := g.find(e.machine, name)
		if err != nil {
			return fmt.Errorf("%s needs a library: %w", file, err)
		}
		if err := g.add(t, library); err != nil {
			return err
		}
	}
	return nil
}

// find finds a shared object where the dynamic linker looks without its cache, which the image does not have. The
// paths below /lib come last: where /lib is /usr/lib, files are once in the image.
func (g gatherer) find(machine elf.Machine, name string) (string, error) {
	for _, dir := range []string{"/usr/lib/*-linux-gnu/", "/usr/lib64/", "/usr/lib/", "/lib/*-linux-gnu/", "/lib64/",
		"/lib/"} {
		matches, err := filepath.Glob(g.at(dir + name))
		if err != nil {
			return "", fmt.Errorf("looking for %s: %w", name, err)
		}
		for _, match := range matches {
			if e, err := read(match); err == nil && e.machine == machine {
				return g.below(match), nil
			}
		}
	}
	return "", fmt.Errorf("%s, of %v: %w", name, machine, fs.ErrNotExist)
}

// executable describes what a dynamic ELF file needs.
type executable struct {
	machine     elf.Machine
	interpreter string // "" for a library
	needed      []string
}

func read(name string) (executable, error) {
	f, err := elf.Open(name)
	if err != nil {
		return executable{}, fmt.Errorf("not a Linux binary: %w", err)
	}
	defer f.Close()
	e := executable{machine: f.Machine}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text := make([]byte, p.Filesz)
		if _, err := p.ReadAt(text, 0); err != nil {
			return executable{}, fmt.Errorf("reading the name of its interpreter: %w", err)
		}
		e.interpreter = strings.TrimRight(string(text), "\x00")
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return executable{}, fmt.Errorf("reading what it needs: %w", err)
	}
	// Some programs need the dynamic linker as a library, but it is always present as their interpreter.
	e.needed = slices.DeleteFunc(needed, func(n string) bool { return strings.HasPrefix(n, "ld-linux") })
	return e, nil
}
